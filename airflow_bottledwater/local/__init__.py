"""Real servers without containers, for tests and the demo: PostgreSQL, Kafka, a schema registry and Airflow.

Each listens on 127.0.0.1 only and keeps everything in a folder of its own. `DataStack` starts the first three together.
"""
