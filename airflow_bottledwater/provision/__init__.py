"""Creates, checks and drops what a pipeline needs in PostgreSQL and Kafka, and publishes its dead letters on
request."""
