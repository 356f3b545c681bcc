"""All metrics, in one place: what each is called, its unit, its labels, and what Debezium and postgres_exporter call
the same. To add one, write it here and set it where it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: the prefix of all names
PREFIX = "bottledwater_"

#: seconds, for durations of a commit and for delays: from what a local broker takes to what nobody wants
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    :param name: without prefix and without the suffix of a counter, but with its unit.
    :param kind: a counter only grows while one job runs, and begins with zero in the next one, unless it is lasting.
    :param sentence: what it is, for people.
    :param labels: in addition to the pipeline.
    :param like: what Debezium or postgres_exporter call the same; empty if they have no name for it.
    :param lasting: whether a counter goes on over jobs, so that nobody knows here since when it counts.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    sentence: str
    labels: tuple[str, ...] = ()
    like: str = ""
    lasting: bool = False

    @property
    def full(self) -> str:
        """The name as Prometheus shows it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


#: all metrics, by their names
METRICS: dict[str, Metric] = {}


def _metric(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    sentence: str,
    *labels: str,
    like: str = "",
    lasting: bool = False,
) -> Metric:
    METRICS[name] = found = Metric(name, kind, sentence, labels, like, lasting)
    return found


# ---------------------------------------------------------------------- what is published
ROWS = _metric(
    "counter", "rows", "Row changes that the stream has published.", "table", "operation",
    like="Debezium `TotalNumberOf{Create,Update,Delete}EventsSeen`, `debezium_event_count_total`",
)  # fmt: skip
CHANGED = _metric(
    "gauge", "last_change_timestamp_seconds",
    "When the last change of the table that this job has published was committed, in seconds since 1970.", "table",
)  # fmt: skip
BYTES = _metric("counter", "published_bytes", "Bytes of the records in committed Kafka transactions.")
TRANSACTIONS = _metric(
    "counter", "transactions", "Source transactions that were received.",
    like="Debezium `NumberOfCommittedTransactions`, `debezium_transaction_committed_count_total`",
)  # fmt: skip
COMMIT_SECONDS = _metric(
    "histogram", "commit_duration_seconds", "Seconds for which a Kafka transaction waited for Kafka, with its commit."
)
DELAY_SECONDS = _metric(
    "histogram", "delay_seconds",
    "Seconds from a transaction's commit in PostgreSQL until it is committed in Kafka, without the clocks' difference.",
    like="Debezium `MilliSecondsBehindSource` with `P50`, `P95`, `P99`",
)  # fmt: skip
CLOCK_SECONDS = _metric(
    "gauge", "clock_difference_seconds", "By how much PostgreSQL's clock is ahead of the clock of the job's host."
)
SUPERSEDED = _metric(
    "counter", "superseded_rows", "Rows left out for a newer version of them, since the slot was created.",
    lasting=True,
)  # fmt: skip
LEFT_OUT = _metric(
    "counter", "left_out_changes", "Changes left out: the snapshot has them, or their table is not followed.",
    like="Debezium `NumberOfEventsFiltered`, `debezium_event_filtered_count_total`",
)  # fmt: skip
DEAD_LETTERS = _metric(
    "counter", "dead_letters", "Dead letters that were written since the slot was created.",
    like="Debezium `NumberOfErroneousEvents`, `debezium_event_erroneous_count_total`", lasting=True,
)  # fmt: skip
OPEN_LETTERS = _metric("gauge", "open_dead_letters", "Dead letters that nobody has re-driven or dismissed.")

# ---------------------------------------------------------------------- lag, and what it costs the source
LAG_BYTES = _metric(
    "gauge", "lag_bytes", "Bytes of WAL from what is published to the end of the WAL.",
    like="postgres_exporter `pg_replication_slots_pg_wal_lsn_diff`",
)  # fmt: skip
LAG_SECONDS = _metric(
    "gauge", "lag_seconds", "Age of the oldest change that is not published; 0 if all is.",
    like="Debezium `MilliSecondsBehindSource`, `debezium_source_lag_seconds`",
)  # fmt: skip
WAL_KEPT = _metric("gauge", "slot_wal_kept_bytes", "Bytes of WAL that PostgreSQL keeps for the slot.")
WAL_LIMIT = _metric(
    "gauge", "slot_wal_limit_bytes", "max_slot_wal_keep_size: beyond it the slot may be lost; absent without a limit.",
    like="postgres_exporter `pg_settings_max_slot_wal_keep_size_bytes`",
)  # fmt: skip
WAL_SAFE = _metric(
    "gauge", "slot_safe_wal_bytes", "Bytes of WAL until the slot may be lost; absent without a limit.",
    like="postgres_exporter `pg_replication_slot_safe_wal_size_bytes`",
)  # fmt: skip
WAL_STATUS = _metric(
    "gauge", "slot_wal_status", "1 for the slot's wal_status: reserved, extended, unreserved or lost.", "status",
    like="postgres_exporter `pg_replication_slot_wal_status`",
)  # fmt: skip
SLOT_ACTIVE = _metric(
    "gauge", "slot_active", "1 while somebody reads from the slot.",
    like="postgres_exporter `pg_replication_slots_active`, Debezium `Connected`",
)  # fmt: skip
SPILLED = _metric(
    "counter", "slot_spilled_transactions", "Transactions that PostgreSQL wrote to disk to decode them.", lasting=True
)
SPILLED_BYTES = _metric("counter", "slot_spilled_bytes", "Bytes that it wrote to disk for that.", lasting=True)
XMIN_AGE = _metric(
    "gauge", "oldest_xmin_age_transactions",
    "Age of the oldest xmin that keeps VACUUM from removing rows, in transactions, by who holds it.", "holder",
)  # fmt: skip
GUARD_PRESSURE = _metric(
    "gauge", "guard_pressure_ratio", "How near the job is to a limit of the guard: 1 is at the limit.", "limit"
)
GUARD_STEPS = _metric(
    "counter", "guard_steps", "Steps of the guard: reading rested, its snapshot was renewed, the job stopped.",
    "limit", "step",
)  # fmt: skip

# ---------------------------------------------------------------------- the job
STATE = _metric(
    "gauge", "state",
    "1 for the state that the pipeline's job reports; failed also where none can begin, snapshot until it is followed.",
    "state", like="Debezium `Connected`, `debezium_connection_status`",
)  # fmt: skip
WANTED = _metric("gauge", "wanted", "1 if the pipeline is meant to run: it was neither asked to stop nor retired.")
REPORT_AGE = _metric("gauge", "last_report_age_seconds", "Seconds since the pipeline's job has reported.")
READ_AT = _metric("gauge", "read_timestamp_seconds", "When these values were read from Kafka, in seconds since 1970.")
PROBLEMS = _metric(
    "gauge", "problems", "What is not as it is meant although the job runs, or has finished, by its kind.", "kind"
)
CLAIMS = _metric(
    "counter", "claims", "Jobs that have begun to work on the slot: one more with each start.", lasting=True
)
REPEATS = _metric("gauge", "failed_starts", "Stream jobs in a row that have failed without publishing anything.")
MEMORY = _metric("gauge", "memory_bytes", "Resident memory of the process that publishes.")
CPU = _metric("counter", "cpu_seconds", "Processor time of the process that publishes.")
UNFOLLOWED = _metric("gauge", "tables_not_followed", "Tables that the patterns cover and that are not published.")

# ---------------------------------------------------------------------- snapshots and verification
RANGES = _metric("gauge", "snapshot_ranges", "Ranges of the snapshot, done and in all.", "state",
                 like="Debezium `TotalTableCount`, `RemainingTableCount` (tables)")  # fmt: skip
SNAPSHOT_ROWS = _metric("gauge", "snapshot_rows", "Rows that the snapshot has published.",
                        like="Debezium `RowsScanned`")  # fmt: skip
SNAPSHOT_BYTES = _metric(
    "gauge", "snapshot_bytes", "Size of the tables' blocks that the snapshot has published, and of all.", "state"
)
SNAPSHOT_LEFT = _metric("gauge", "snapshot_left_seconds", "Seconds that the snapshot needs at its present pace.")
LIVE = _metric("gauge", "live_snapshots", "Live snapshots that were asked for, by state.", "state",
               like="Debezium `ChunkId`, `TableFrom`, `TableTo`")  # fmt: skip
LIVE_ROWS = _metric("gauge", "live_snapshot_rows", "Rows that live snapshots which have not ended have published.")
VERIFIED_AGE = _metric(
    "gauge", "verified_age_seconds", "Seconds since the end of the last verification of all rows of all tables."
)
VERIFIED_WRONG = _metric(
    "gauge", "verified_tables", "Tables by what verifications have found: different, or unverified.", "result"
)
