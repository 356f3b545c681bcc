"""The Spark jobs: thin wrappers around the snapshot and the stream, and the jobs' submission."""
