"""Spark only adapts: jobs, the data source of the stream, submission. Everything that decides is in flow/."""
