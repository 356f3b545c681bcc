"""The proof that a topic equals its table, while the stream runs."""
