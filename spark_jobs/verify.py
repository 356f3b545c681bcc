"""spark-submit entry point: the comparison of topics with their tables, while the stream runs."""

from airflow_bottledwater.spark.verify import main

if __name__ == "__main__":
    main()
