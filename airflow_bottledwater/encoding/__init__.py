"""From PostgreSQL's binary values to Avro and JSON: the type table, a small program per table, compiled kernels."""
