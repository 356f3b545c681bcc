"""What is followed and why: what is known of a pipeline's tables is compared with the catalog, and brought up to it."""
