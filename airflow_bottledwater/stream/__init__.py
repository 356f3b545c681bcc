"""The stream: receives changes, assembles transactions, and publishes them in batches, each together with the
position."""
