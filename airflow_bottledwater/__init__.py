"""Change data capture for Apache Airflow: PostgreSQL snapshots and change streams into Kafka, exactly once."""

__version__ = "0.1.0"
