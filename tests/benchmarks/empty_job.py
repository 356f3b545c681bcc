"""A Spark job of one task; prints when it was done."""

from __future__ import annotations

import time

from pyspark.sql import SparkSession

if __name__ == "__main__":
    spark = SparkSession.builder.appName("empty").getOrCreate()
    assert spark.sparkContext.parallelize([1], 1).map(lambda n: n + 1).collect() == [2]
    print(time.time(), flush=True)
    spark.stop()
