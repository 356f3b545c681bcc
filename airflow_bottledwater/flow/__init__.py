"""Everything that decides: the hand-over, positions, batches, errors. Runs in one process, without a JVM."""
