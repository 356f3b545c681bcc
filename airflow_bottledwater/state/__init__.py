"""What a pipeline remembers, in Kafka: typed records, who may work on a slot, and what jobs report. Imports no numba."""
