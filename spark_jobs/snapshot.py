"""spark-submit entry point: a consistent snapshot of the pipeline's tables into Kafka."""

from airflow_bottledwater.spark.snapshot import main

if __name__ == "__main__":
    main()
