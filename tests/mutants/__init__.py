"""Each rule taken out once, to see that a test notices."""
