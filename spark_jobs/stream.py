"""spark-submit entry point: the stream of committed changes into Kafka."""

from airflow_bottledwater.spark.stream import main

if __name__ == "__main__":
    main()
