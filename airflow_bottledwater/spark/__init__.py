"""The Spark jobs: thin wrappers around the snapshot and the stream, the stream's data source, and the jobs' submission."""
