"""Kafka: topics, the schema registry, the transactional publisher, the state topics."""
