"""What a pipeline measures: the list of metrics, what the jobs count, the samples that they write to a topic, and the
ways in which these are read: Prometheus, OpenTelemetry, a terminal."""
