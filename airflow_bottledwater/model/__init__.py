"""Frozen value objects that all other rooms use; they need only the standard library.

The terms, as they are used everywhere in code and documentation:

* **A**, the *consistent point* of a slot: every transaction whose commit record lies at or after it is streamed.
* **X0**, the *oldest transaction id* of a table: taken after A was known. The snapshot is valid only if all
  transactions with lower ids had ended (``xmin >= X0``).
* **B**, the *boundary*: the snapshot (``pg_current_snapshot()``) that the tables are read under. What B sees is in the
  snapshot, and the stream leaves it out.
* **L**, the WAL *insert position* that was read after B: a transaction that B sees has its commit record before L, so
  that the filter expires by itself there.
* **P**, the *position*: (LSN, ordinal), how far the stream has published. It is written in the same Kafka transaction
  as the records it stands for.
* A *lane* is one connection and one producer of the snapshot; a *chunk* is the range of blocks of a table that it
  publishes in one Kafka transaction.
* An *epoch* numbers the jobs that have claimed a slot; a *claim* is the record that names the job the slot belongs to.
"""
