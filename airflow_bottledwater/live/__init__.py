"""Live snapshots: rows of tables, read again while the stream runs, and published in its order. The argument is in
docs/guarantees.md."""
