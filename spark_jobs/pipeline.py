"""spark-submit entry point: a consistent snapshot of the pipeline's tables into Kafka, and then the stream of committed
changes."""

from airflow_bottledwater.spark.pipeline import main

if __name__ == "__main__":
    main()
