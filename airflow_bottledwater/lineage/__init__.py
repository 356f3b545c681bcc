"""What OpenLineage is told of a pipeline: its tables and topics, and by its jobs while they run."""
