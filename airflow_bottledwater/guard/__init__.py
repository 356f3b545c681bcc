"""What keeps a pipeline from harming its source: what is measured of that, and what is done about it."""
