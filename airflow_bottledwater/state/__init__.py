"""What a pipeline remembers, in Kafka: typed records, the claim on a slot, and the status of jobs. Imports no numba."""
