"""Encodes PostgreSQL's binary values as Avro and JSON: the type table, a small program for each table, compiled
kernels."""
