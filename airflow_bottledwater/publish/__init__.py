"""One way into Kafka for the snapshot and the stream: complete rows, encode them, publish them in one transaction with
progress."""
