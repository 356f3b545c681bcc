"""The stream: receives changes, assembles transactions, and publishes them in batches that carry the position."""
