"""The mutants: a rule, the source line that keeps it, what stands there without it, and the test that must then fail."""

from __future__ import annotations

from dataclasses import dataclass

_PIPELINE, _RECOVERY, _HANDOVER, _RANDOM, _EVOLUTION = (
    f"tests/integration/test_{name}.py" for name in ("pipeline", "recovery", "handover", "handover_random", "evolution")
)
_DEATH, _ZOMBIES, _OUTAGES = (f"tests/faults/test_{name}.py" for name in ("death", "zombies", "outages"))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A patch of one place in the package.

    :param old: occurs exactly once in the file.
    :param caught_by: the test's node id.
    """

    rule: str
    file: str
    old: str
    new: str
    caught_by: str


MUTANTS = (
    Mutant(
        "what the snapshot holds is not streamed",
        "flow/transactions.py",
        "if boundary_of[at] >= 0 and hidden[boundary_of[at]]:",
        "if False:",
        f"{_RANDOM}::test_a_handover_under_writers_loses_repeats_and_tears_nothing[1]",
    ),
    Mutant(
        "what was running at the boundary is streamed",
        "flow/transactions.py",
        "        if running[i] == wide:\n            return False",
        "        if running[i] == wide:\n            return True",
        f"{_RANDOM}::test_a_handover_under_writers_loses_repeats_and_tears_nothing[1]",
    ),
    Mutant(
        "inside a transaction, ordinals up to P's are skipped",
        "flow/transactions.py",
        "if final < state[_FROM_LSN] or (final == state[_FROM_LSN] and ordinal <= state[_FROM_ORDINAL]):",
        "if final < state[_FROM_LSN]:",
        f"{_PIPELINE}::test_a_large_transaction_is_cut_and_a_restart_goes_on_inside_it",
    ),
    Mutant(
        "a foreign claim ends the job",
        "flow/claim.py",
        'if claim["id"] != job.id:',
        "if False:",
        f"{_PIPELINE}::test_the_newer_of_two_streams_takes_over_and_the_older_names_it",
    ),
    Mutant(
        "no stream before the snapshot is complete",
        "flow/runner.py",
        "if not known.complete:",
        "if False:",
        f"{_PIPELINE}::test_a_snapshot_is_resumed_after_deletes_key_changes_and_moved_rows",
    ),
    Mutant(
        "a table that was rewritten is read again from its start",
        "flow/snapshot.py",
        "if stored is not None and (stored.filenode, stored.definition) == (\n                table.filenode,",
        "if stored is not None and (table.filenode, stored.definition) == (\n                table.filenode,",
        f"{_PIPELINE}::test_a_table_that_was_rewritten_during_its_snapshot_is_read_again",
    ),
    Mutant(
        "a slot ahead of P is refused",
        "flow/source.py",
        "if found.confirmed > position.lsn:",
        "if False:",
        f"{_PIPELINE}::test_a_slot_that_was_moved_forward_or_dropped_is_refused",
    ),
    Mutant(
        "the position moves where nothing is published",
        "flow/source.py",
        "batch = self._cutter.flush(empty=hurry or time.monotonic() - self._last_empty >= interval)",
        "batch = self._cutter.flush(empty=hurry)",
        f"{_PIPELINE}::test_an_idle_table_in_a_busy_database_does_not_retain_wal",
    ),
    Mutant(
        "a walsender that ended is an outage",
        "flow/policy.py",
        "    errors.Outage: Act.WAIT,\n",
        "    errors.Outage: Act.END,\n",
        f"{_PIPELINE}::test_a_walsender_that_is_terminated_is_reconnected",
    ),
    Mutant(
        "a record is compared with its topic's limit",
        "flow/delivery.py",
        "found: npt.NDArray[np.bool_] = records.sizes() > self.limits[records.table[:, wire.R_TOPIC]]",
        "found: npt.NDArray[np.bool_] = records.sizes() < 0",
        f"{_PIPELINE}::test_a_record_larger_than_its_topic_takes_is_one_dead_letter_among_a_thousand_good_ones",
    ),
    Mutant(
        "a skipped position is this position only",
        "flow/delivery.py",
        "return str(position) == self._pipeline.skip_position.upper()",
        "return bool(self._pipeline.skip_position)",
        f"{_RECOVERY}::test_the_stream_stops_before_a_bad_record_stops_there_again_and_passes_it_when_told",
    ),
    Mutant(
        "what precedes a bad transaction is published",
        "flow/delivery.py",
        "if good.end > batch.start and batch.start.lsn < position.lsn:",
        "if False:",
        f"{_RECOVERY}::test_the_stream_stops_before_a_bad_record_stops_there_again_and_passes_it_when_told",
    ),
    Mutant(
        "a dropped column is a record error, not a superseded version",
        "flow/rows.py",
        'if error.sqlstate in ("42P01", "3F000"):',
        'if error.sqlstate in ("42P01", "3F000", "42703"):',
        f"{_RECOVERY}::test_a_column_that_is_gone_before_its_toast_value_was_read_is_a_record_error",
    ),
    Mutant(
        "an overtaken letter is dropped",
        "flow/redrive.py",
        "return position > letter.position or at > letter.timestamp",
        "return False",
        f"{_RECOVERY}::test_dead_letters_are_published_when_their_cause_is_mended_unless_overtaken",
    ),
    Mutant(
        "letters wait for the stream's end",
        "flow/redrive.py",
        "if found is not None and found.active_pid is not None:",
        "if False:",
        f"{_RECOVERY}::test_dead_letters_are_not_touched_while_the_stream_runs",
    ),
    Mutant(
        "after a lost slot, keys that are gone are deleted",
        "flow/sweep.py",
        "if live and at < ends[partition]",
        "if live and at < 0",
        f"{_RECOVERY}::test_after_a_lost_slot_a_snapshot_sweeps_what_the_source_no_longer_has",
    ),
    Mutant(
        "a sweep leaves what is deleted already",
        "flow/sweep.py",
        "if live and at < ends[partition]",
        "if at < ends[partition]",
        f"{_RECOVERY}::test_after_a_lost_slot_a_snapshot_sweeps_what_the_source_no_longer_has",
    ),
    Mutant(
        "shared topics are not swept",
        "flow/snapshot.py",
        "if any(ends) and table.keyed and not self._pipeline.share_topics:",
        "if any(ends) and table.keyed:",
        f"{_RECOVERY}::test_a_topic_that_others_share_is_not_swept",
    ),
    Mutant(
        "without facts, no position before what the slot still has",
        "flow/setup.py",
        "if present.confirmed > position.lsn:",
        "if False:",
        f"{_RECOVERY}::test_without_its_facts_a_slot_goes_on_at_the_users_word",
    ),
    Mutant(
        "a second attempt goes on where the first came to",
        "flow/runner.py",
        "position = publisher.reached() or start.position",
        "position = start.position",
        f"{_RECOVERY}::test_a_second_attempt_of_a_claimed_stream_goes_on_where_the_first_came_to",
    ),
    Mutant(
        "rotated credentials are waited for",
        "flow/source.py",
        "not (self._worked and isinstance(error, CredentialsRefused))",
        "True",
        f"{_RECOVERY}::test_a_password_that_is_rotated_while_the_stream_runs_is_taken_up_at_the_next_reconnect",
    ),
    Mutant(
        "the holder locks before it takes the snapshot",
        "postgres/snapshot.py",
        '        _lock(self._connection, tables)\n        row = execute("SELECT pg_current_snapshot()::text").fetchone()\n        assert row is not None\n        snapshot = Snapshot.parse(row[0])\n',
        '        row = execute("SELECT pg_current_snapshot()::text").fetchone()\n        assert row is not None\n        snapshot = Snapshot.parse(row[0])\n        _lock(self._connection, tables)\n',
        f"{_HANDOVER}::test_a_rewrite_that_commits_while_the_holder_opens_does_not_empty_the_snapshot",
    ),
    Mutant(
        "L is read, and behind what B sees",
        "postgres/snapshot.py",
        'pg_current_wal_insert_lsn()::text").fetchone()',
        'pg_current_wal_flush_lsn()::text").fetchone()',
        f"{_HANDOVER}::test_an_asynchronous_commit_that_the_snapshot_sees_is_before_the_boundary",
    ),
    Mutant(
        "what B sees is on disk before it is published",
        "flow/snapshot.py",
        "holder.wait_flushed(held.insert_lsn, timeout=self._pipeline.outage_timeout)",
        "pass",
        f"{_HANDOVER}::test_nothing_is_published_that_a_crash_of_the_server_can_undo",
    ),
    Mutant(
        "who wrote before a table was published has ended when B is taken",
        "postgres/snapshot.py",
        "slot.wait_visible(self._connection, oldest_xid, timeout=timeout)\n        deadline = time.monotonic() + timeout\n",
        "oldest_xid = 0\n        deadline = time.monotonic() + timeout\n",
        f"{_HANDOVER}::test_a_table_that_is_added_while_somebody_writes_to_it_waits_for_who_wrote_before",
    ),
    Mutant(
        "a lane locks before it imports the snapshot",
        "postgres/snapshot.py",
        '        _lock(connection, [table])\n        connection.execute(f"SET TRANSACTION',
        '        connection.execute(f"SET TRANSACTION',
        f"{_HANDOVER}::test_a_truncate_that_waited_behind_a_dying_holder_is_not_taken_for_an_empty_table",
    ),
    Mutant(
        "the last range is open-ended",
        "postgres/snapshot.py",
        "LAST_BLOCK if i == len(starts) - 1 else",
        "max(1, table.pages) if i == len(starts) - 1 else",
        f"{_HANDOVER}::test_rows_that_move_behind_the_planned_end_are_in_the_last_range",
    ),
    Mutant(
        "a slot during whose creation a table was truncated is made again",
        "flow/setup.py",
        "        if catalog.fingerprint(connection, oids) == before:\n            return point",
        "        if True:\n            return point",
        f"{_HANDOVER}::test_a_table_that_is_truncated_while_the_slot_is_built_is_streamed",
    ),
    Mutant(
        "transaction ids are compared across the 32-bit wrap",
        "flow/transactions.py",
        "wide = xmax + difference - 0x100000000 if difference >= 0x80000000 else xmax + difference",
        "wide = (xmax & ~0xFFFFFFFF) | xid",
        f"{_HANDOVER}::test_transactions_on_both_sides_of_the_wrap_are_told_apart",
    ),
    Mutant(
        "a topic that held rows is not filtered",
        "flow/snapshot.py",
        "Boundary(held.snapshot, held.insert_lsn, oldest, not any(ends))",
        "Boundary(held.snapshot, held.insert_lsn, oldest, True)",
        f"{_HANDOVER}::test_a_topic_that_held_rows_before_gets_every_change_since_the_slot",
    ),
    Mutant(
        "a new producer looks whose the slot is",
        "flow/delivery.py",
        "        check(found, self.job)\n        self._open = True",
        "        self._open = True",
        f"{_ZOMBIES}::test_a_new_producer_of_a_replaced_job_is_told_before_its_first_record",
    ),
    Mutant(
        "a slot that a successor moved is no damage",
        "flow/source.py",
        "                self._still_ours()\n",
        "",
        f"{_ZOMBIES}::test_a_stream_that_was_replaced_wakes_and_ends[before-acknowledge]",
    ),
    Mutant(
        "a claim that was fenced looks by whom",
        "flow/claim.py",
        "                    check(found, self.job)\n                    return before",
        "                    raise NewProducerNeeded(str(error)) from error",
        f"{_ZOMBIES}::test_a_stream_that_was_replaced_wakes_and_ends[in-claim]",
    ),
    Mutant(
        "a batch that is published is not published again",
        "flow/delivery.py",
        "if self._position is not None and self._position >= batch.end and batch.end > batch.start:",
        "if False:",
        f"{_ZOMBIES}::test_a_batch_whose_first_attempt_was_committed_is_not_published_again",
    ),
    Mutant(
        "a range that is done is not published again",
        "flow/lane.py",
        "done = self._state.done(part.oid, part.number)",
        "done = None",
        f"{_ZOMBIES}::test_a_lane_whose_first_attempt_was_committed_publishes_nothing_again",
    ),
    Mutant(
        "to be fenced is not to be taken over",
        "flow/delivery.py",
        'log.warning("%s: a new producer reads the state and goes on.", error)\n                self._channel.close()',
        "raise StaleBatch(str(error)) from error\n                self._channel.close()",
        f"{_ZOMBIES}::test_a_zombie_that_fences_the_rightful_owner_ends_and_the_owner_goes_on",
    ),
    Mutant(
        "a commit whose answer is lost is asked for again",
        "kafka/publisher.py",
        "            if retriable and not fatal:",
        "            if False:",
        f"{_OUTAGES}::test_a_commit_whose_answer_is_lost_is_asked_for_again_and_not_aborted",
    ),
    Mutant(
        "what an outage has left open for ever is ended",
        "flow/delivery.py",
        "lambda: release(self.pipeline.kafka, self._publisher, self._names),",
        "lambda: None,",
        f"{_OUTAGES}::test_a_broker_that_is_away_for_longer_than_the_time_out_is_no_takeover",
    ),
    Mutant(
        "PostgreSQL is told after Kafka",
        "flow/runner.py",
        "                position = publisher.publish(batch)\n                source.acknowledge(position)",
        "                source.acknowledge(batch.end)\n                position = publisher.publish(batch)",
        f"{_RECOVERY}::test_the_stream_stops_before_a_bad_record_stops_there_again_and_passes_it_when_told",
    ),
    Mutant(
        "records and position are one transaction",
        "flow/delivery.py",
        "                parts(self._publisher)\n                for key, value in progress.items():",
        "                parts(self._publisher)\n            with self._publisher.transaction():\n                for key, value in progress.items():",
        f"{_DEATH}::test_a_stream_that_is_killed_at_every_named_point_and_restarted[1]",
    ),
    Mutant(
        "a cut transaction goes on where it was cut",
        "flow/delivery.py",
        '            "ordinal": batch.end.ordinal,',
        '            "ordinal": 0,',
        f"{_DEATH}::test_a_stream_that_is_killed_at_every_named_point_and_restarted[1]",
    ),
    Mutant(
        "a row without a schema is a record error",
        "flow/delivery.py",
        "        verdicts += _without_schema(completed.batch, records)\n",
        "",
        f"{_EVOLUTION}::test_a_change_of_columns_or_types_is_published_or_a_record_error[other-BACKWARD]",
    ),
    Mutant(
        "a dead letter of a refused schema is registered again when it is re-driven",
        "flow/redrive.py",
        "        if not version.refused:",
        "        if True:",
        f"{_EVOLUTION}::test_a_change_of_columns_or_types_is_published_or_a_record_error[other-BACKWARD]",
    ),
    Mutant(
        "a type that was altered is read anew",
        "flow/delivery.py",
        "        self._check_definitions(completed.batch, programs, encoded.verdicts)\n",
        "",
        f"{_EVOLUTION}::test_a_type_that_changes_while_the_stream_runs_is_read_anew[attribute]",
    ),
    Mutant(
        "what pgoutput cannot send is refused beforehand",
        "flow/preflight.py",
        "catalog.unsendable(connection, found.tables)",
        "()",
        "tests/integration/test_bad_input.py::test_a_table_is_refused[made of a type that cannot be sent]",
    ),
    Mutant(
        "two types do not share a name in Avro",
        "encoding/avro.py",
        "if seen.setdefault(name, schema) != schema:",
        "if False:",
        "tests/integration/test_bad_input.py::test_a_table_is_refused[with two types of one name]",
    ),
    Mutant(
        "a change that is too large takes no room without end",
        "flow/delivery.py",
        "if not made and not failed and out.size - used > room_for(most):",
        "if False:",
        "tests/integration/test_large_values.py::test_a_value_of_500_megabytes_takes_at_most_four_times_its_size[json-1048576-1-made3]",
    ),
)
