"""Kafka: client settings and errors, topics, the schema registry, and transactional producers."""
