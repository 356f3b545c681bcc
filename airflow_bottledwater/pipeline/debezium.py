"""What a Debezium connector's configuration becomes: a pipeline that does the same, and what differs.

The properties are those of Debezium 3's PostgreSQL connector and of Kafka Connect
(https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-connector-properties).
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.expressions import as_patterns, meet, named, split, tables_of
from airflow_bottledwater.pipeline.patterns import is_meant

_CONNECTOR = "io.debezium.connector.postgresql.PostgresConnector"
#: the transformation that takes the row out of the envelope
_UNWRAP = "io.debezium.transforms.ExtractNewRecordState"
#: the transformation that makes records of an outbox's rows
_OUTBOX = "io.debezium.transforms.outbox.EventRouter"
#: the transformation that chooses a record's partition by fields of its value
_ROUTING = "io.debezium.transforms.partitions.PartitionRouting"
#: the lists without which more is published, and a table that no database has, for which preflight refuses the file
_INCLUDED, _UNCLEAR = ("table.include.list", "schema.include.list"), "public.NAME_WHAT_IS_MEANT"
#: how what is secret is given
_NOT_HERE = (
    "It is not written here: put it into Airflow's connection, and for the command into a password file (~/.pgpass)."
)

#: properties whose effect is the same without a setting, or that only concern Kafka Connect
_NOT_NEEDED = re.compile(
    r"name|connector\.class|tasks\.max|task\..*|config\..*|offset\..*|exactly\.once\..*|transaction\.boundary.*|"
    r"(key|value|header)\.converter(\..*)?|internal\..*|predicates(\..*)?|converters|errors\..*|retriable\..*|"
    r"max\.(batch|queue)\..*|poll\.interval\.ms|snapshot\.(fetch\.size|delay\.ms|lock\..*|isolation\.mode)|"
    r"slot\.(retry|max|seek|failover).*|status\.update\..*|xmin\.fetch\..*|database\.(tcpKeepAlive|initial\..*)|"
    r"connection\.validation.*|lsn\.flush\..*|flush\.lsn\..*|topic\.(naming\.strategy|cache\.size)|"
    r"custom\.metric\.tags|unavailable\.value\.placeholder|sourceinfo\..*|"
    r"heartbeat\..*|publication\.name|topic\.creation\.enable|guardrail\..*|schema\.refresh\.mode|driver\..*"
)
#: what the values of a property become; None: as without it
_VALUES: dict[str, dict[str, tuple[str, Any] | None]] = {
    "decimal.handling.mode": {
        "precise": None,
        "string": ("types.numeric", "string"),
        "double": ("types.numeric", "double"),
    },
    "time.precision.mode": {
        "isostring": ("types.temporal", "text"),
    },
    "publication.autocreate.mode": {
        "filtered": None,
        "all_tables": None,
        "disabled": ("source.create_publication", False),
    },
    "event.processing.failure.handling.mode": {
        "fail": None,
        "warn": ("on_error", "log"),
        "skip": ("on_error", "log"),
        "ignore": ("on_error", "log"),
    },
    "snapshot.mode": {
        "initial": None,
        "no_data": ("source.skip_snapshot", True),
        "never": ("source.skip_snapshot", True),
    },
    "plugin.name": {"pgoutput": None},
    "tombstones.on.delete": {"true": None},
    "skipped.operations": {"none": None, "t": None},
    "field.name.adjustment.mode": {"none": None, "avro": None},
    "schema.name.adjustment.mode": {"none": None, "avro": None},
    "include.schema.changes": {"false": None},
    "include.unknown.datatypes": {"false": None},
    "binary.handling.mode": {"bytes": None},
    "slot.drop.on.stop": {"false": None},
}
#: what is said of a property, or of a value that is not in the list above
_SAID = {
    "decimal.handling.mode": "Choose types.numeric: decimal, string or double.",
    "time.precision.mode": "Dates and times are Avro's date, time-micros and timestamp-micros, and ISO 8601 in "
    "JSON; see types.temporal.",
    "publication.autocreate.mode": "No publication of all tables and none without tables is made: it has what the "
    "patterns cover, without tables that have no key.",
    "event.processing.failure.handling.mode": "A record that cannot be published ends the stream (on_error: exit), or "
    "becomes a dead letter (on_error: log).",
    "snapshot.mode": "The snapshot is taken when the slot is created, and only then. To read tables again, ask for a "
    "live snapshot.",
    "plugin.name": "The slot decodes by pgoutput; a slot of another plugin cannot be used.",
    "tombstones.on.delete": "A deletion has a tombstone, always; with an envelope, behind its event.",
    "skipped.operations": "No operation is left out; a TRUNCATE is an event in a topic of its own.",
    "field.name.adjustment.mode": "What Avro does not allow in a name becomes _xx_, as in docs/message-format.md.",
    "schema.name.adjustment.mode": "What Avro does not allow in a name becomes _xx_, as in docs/message-format.md.",
    "include.schema.changes": "There is no topic of schema changes; the registry has each table's schemas.",
    "provide.transaction.metadata": "The end of each source transaction is a record, in a form of its own "
    "(docs/message-format.md); its beginning is none.",
    "include.unknown.datatypes": "A type that is not known is published as PostgreSQL's text.",
    "binary.handling.mode": "bytea is bytes in Avro and Protobuf, and base64 in JSON.",
    "slot.drop.on.stop": "The slot stays; 'bottledwater drop-slot', or the task drop_slot, drops it.",
    "message.key.columns": "The key of a record is the table's primary key, or that of its replica identity; the "
    "option key of a table names another one, which a unique index must have. If it is there to have rows of one owner "
    "in one partition, the option partition_by does that by columns of the key.",
    "snapshot.select.statement.overrides": "The snapshot reads all rows that the stream would follow: the option where "
    "of a table takes a condition for both, and a live snapshot one of its own.",
    "snapshot.include.collection.list": "The snapshot reads all tables of the pipeline.",
    "signal.data.collection": "Live snapshots are asked for through Kafka ('bottledwater snapshot'). The table for "
    "signals is not needed: leave it out of the tables.",
    "message.prefix.include.list": "Logical messages are published if kafka.messages names topics for their prefixes.",
    "message.prefix.exclude.list": "Logical messages are published if kafka.messages names topics for their prefixes.",
    "hstore.handling.mode": "hstore is a map in Avro, and an object in JSON.",
    "interval.handling.mode": "An interval is ISO 8601 text (handling mode string); without an envelope, in Avro, a "
    "record of months, days and microseconds.",
    "money.fraction.digits": "money has as many decimal places as the server's lc_monetary gives it.",
    "notification.enabled.channels": "What a pipeline does is in its status, its metrics and its page in Airflow.",
    "incremental.snapshot.chunk.size": "A live snapshot chooses the size of its chunks itself.",
    "read.only": "A live snapshot writes nothing to the source.",
    "slot.stream.params": "pgoutput's parameters are those that the records need.",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """What a connector becomes.

    :param description: the pipeline, in the shape of its YAML file.
    :param differences: by property, what is not the same; those of no property under ``""``.
    """

    description: dict[str, Any]
    differences: list[tuple[str, str]]

    def yaml(self) -> str:
        """The file, with what differs as a comment at its beginning."""
        lines = ["What differs from the connector:"]
        for name, said in self.differences:
            lines += textwrap.wrap(f"{name}: {said}" if name else said, 96, initial_indent="* ", subsequent_indent="  ")
        return "".join(f"# {line}\n" for line in lines) + msgspec.yaml.encode(self.description).decode()


def imported(raw: Any) -> Imported:
    """The pipeline that a connector's configuration becomes. Nothing secret is taken over.

    :param raw: what Kafka Connect takes: the properties, or an object with ``name`` and ``config``.
    :raises SettingError: it is none of a PostgreSQL connector of Debezium.
    """
    found = raw.get("config", raw) if isinstance(raw, dict) else raw
    if not isinstance(found, dict) or found.get("connector.class", "") not in (
        _CONNECTOR,
        _CONNECTOR.rpartition(".")[2],
    ):
        raise SettingError(
            "connector.class",
            found.get("connector.class") if isinstance(found, dict) else None,
            f"the configuration of a connector of class {_CONNECTOR}",
        )
    return _Import({str(name): _text(value) for name, value in found.items()}).run()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class _Import:
    """Translates one connector.

    :param given: its properties.
    :param unclear: whether more would be published than the connector does.
    """

    given: dict[str, str]
    made: dict[str, Any] = field(default_factory=dict)
    differences: list[tuple[str, str]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    unclear: bool = False

    def run(self) -> Imported:
        flat = _UNWRAP in self.given.values()
        if flat:
            self._say(
                "",
                "A deletion is a tombstone only, also where the transformation makes a row of it (__deleted), and "
                "fields that it adds to rows are not there: operation, position and time are in the headers.",
            )
            self._say(
                "",
                "Rows without an envelope have no names of Kafka Connect in their schemas: for a sink of it, set "
                "kafka.envelope to debezium, and give the transformation to the sink's connector.",
            )
        else:
            self._put("kafka.envelope", "debezium")
            self._say(
                "",
                "Records are in Debezium's envelope. What differs in it, and in the forms of types, is in "
                "docs/message-format.md (Debezium's envelope).",
            )
        self.made["name"] = self._take("slot.name") or "debezium"
        publication = self.given.get("publication.name", "dbz_publication")
        second = '"' + f"{publication}_unkeyed".replace('"', '""') + '"'
        self._say(
            "slot.name",
            "The pipeline makes a slot of its own, and takes a snapshot: give it another name to run both side by "
            "side, or drop the connector's slot before. Or go on with the connector's slot, without a snapshot: set "
            f"source.publication to {publication} and source.create_publication to false; while the connector still "
            f"runs, run in the database: CREATE PUBLICATION {second} WITH (publish = "
            "'insert, truncate'); stop the connector when it has read on (docs/debezium.md says how far, and what all "
            "that means); then run: bottledwater take-over -c FILE.",
        )
        for part in (self._source, self._tables, self._columns, lambda: self._topics(flat), self._values, self._rest):
            part()
        if self.unclear:
            self._put("source.tables", [_UNCLEAR, *self.made["source"].get("tables", ())])
            self._say(
                "",
                "More would be published than the connector does, since some lists could not be taken over (see there)."
                f" Say in source.tables and table_options what is meant, and take out {_UNCLEAR}: with it, preflight "
                "refuses the file.",
            )
        return Imported(self.made, self.differences)

    # ------------------------------------------------------------------ parts
    def _source(self) -> None:
        """Where it connects; as a connection string without the password."""
        names = {"hostname": "host", "port": "port", "dbname": "dbname", "user": "user", "sslmode": "sslmode"}
        names |= {"sslrootcert": "sslrootcert", "sslcert": "sslcert", "sslkey": "sslkey"}
        values = {short: self._take(f"database.{name}") for name, short in names.items()}
        dsn = " ".join(f"{name}={_quoted(value)}" for name, value in values.items() if value)
        self._put("source.conn_id", f"{self.made['name']}_postgres")
        if dsn:
            self._put("source.dsn", dsn)
        if "database.password" in self.given:
            self._say("database.password", _NOT_HERE)
        self.seen |= {"database.password", "database.sslpassword"}
        if self.given.get("publication.autocreate.mode", "").lower() == "disabled":
            self._put("source.publication", self.given.get("publication.name", "dbz_publication"))
        by_root = self._take("publish.via.partition.root") == "true"
        self._put("source.partitioned_tables", "root" if by_root else "leaves")

    def _tables(self) -> None:
        meant, left_out = self._table_patterns("table.include.list"), self._table_patterns("table.exclude.list")
        schemas, hidden = self._patterns("schema.include.list"), self._patterns("schema.exclude.list")
        if self._take("table.include.list") and schemas:
            self._say(
                "schema.include.list", "Only the tables of table.include.list are published: see that all are meant."
            )
            schemas = []
        if not meant and not schemas:
            if any(self._take(name) for name in _INCLUDED):
                self.unclear = True
            else:
                meant = ["*.*"]
        meant += [f"!{each}" for each in left_out] + [f"!{each}.*" for each in hidden]
        if meant:
            self._put("source.tables", meant)
        if schemas:
            self._put("source.schemas", schemas)
        self._say(
            "",
            "Tables without a key are refused by the preflight check unless source.allow_unkeyed is set; then their "
            "records have no key.",
        )

    def _columns(self) -> None:
        for name, option in (("column.include.list", "include"), ("column.exclude.list", "exclude")):
            for table, column in self._column_patterns(name):
                self._options(table).setdefault(option, []).append(column)
        if self.given.get("column.include.list"):
            self._say(
                "column.include.list",
                "It holds for the tables that it names, and those have to include the columns of their keys; all "
                "others are published whole.",
            )
        for name in sorted(self.given):
            if masked := re.fullmatch(r"column\.mask\.with\.(\d+)\.chars", name):
                for table, column in self._column_patterns(name):
                    self._mask(table, column, f"constant:{'*' * int(masked[1])}")
            elif cut := re.fullmatch(r"column\.truncate\.to\.(\d+)\.chars", name):
                for table, column in self._column_patterns(name):
                    self._mask(table, column, f"first:{cut[1]}")
            elif re.fullmatch(r"column\.mask\.hash.*", name):
                self.seen.add(name)
                self._say(
                    re.sub(r"salt\..*", "salt", name),
                    "The salt is not taken over, and the hash would be another one. Mask the columns in table_options "
                    "(docs/choose.md) before the pipeline is started: now they are published as they are.",
                )
            elif name.startswith("column.propagate.source.type") or name.startswith("datatype.propagate.source.type"):
                self.seen.add(name)
                self._say(name, "Fields have no parameters with the source's types.")
        self._unite()

    def _unite(self) -> None:
        """Have each pattern say what more general ones say of columns: of all expressions that match a table, the
        connector obeys each; a table of a pipeline has each option from the most specific pattern alone."""
        # of two with as many letters, the latter is obeyed (patterns.specificity)
        ordered = sorted(self.made.get("source", {}).get("table_options", {}).items(), key=lambda e: -e[0].count("*"))
        if not (rules := dict(ordered)):
            return
        self.made["source"]["table_options"] = rules
        given = {table: {name: copy(columns) for name, columns in of.items()} for table, of in rules.items()}
        for table, other in itertools.permutations(given, 2):
            if is_meant(other, *named(table)):
                for name, columns in given[other].items():
                    if isinstance(columns, dict):
                        rules[table][name] = columns | rules[table].get(name, {})
                    else:
                        rules[table][name] = list(dict.fromkeys([*rules[table].get(name, ()), *columns]))
            elif table < other and meet(table, other) and not is_meant(table, *named(other)):
                self._say(
                    "column.*",
                    f"A table that {table!r} and {other!r} both describe has the columns of one of them only: give it "
                    "table_options of its own, or columns that the connector leaves out or masks are published.",
                )

    def _topics(self, flat: bool) -> None:
        prefix = self._take("topic.prefix") or self._take("database.server.name")
        if prefix:
            self._put("kafka.topic_prefix", prefix if flat else f"{prefix}.events")
        # the connector's topics have the schema's name also if it is public
        self._options("*.*")["topic"] = "{schema}.{table}"
        self._say(
            "",
            f"Logical messages are not published, of which the connector sends all to {prefix or '…'}.message: "
            "kafka.messages names topics for their prefixes ({'*': message} one for all).",
        )
        self._say(
            "topic.prefix",
            "The topics are the connector's own. Only take-over may go on with them, if it finds records of the same "
            "form. Beside the connector, or with an envelope, give kafka.topic_prefix another value: a topic with "
            "other records is refused, but into one without records both would write."
            if flat
            else f"It is {prefix}.events: the topics of {prefix} are the connector's.",
        )
        if (strategy := self.given.get("topic.naming.strategy", "")).rpartition(".")[2] not in (
            "",
            "SchemaTopicNamingStrategy",
        ):
            self._say("topic.naming.strategy", f"Of {strategy}, no more than the prefix is taken over.")
        ends = self._take("topic.transaction") or "transaction"
        if self._take("provide.transaction.metadata") == "true":
            self._put("kafka.transaction_topic", ends)
            self._say("provide.transaction.metadata", _SAID["provide.transaction.metadata"])
        properties: dict[str, str] = {}
        for name, value in sorted(self.given.items()):
            if not name.startswith("topic.creation.default."):
                continue
            self.seen.add(name)
            short = name.removeprefix("topic.creation.default.")
            if short in ("partitions", "replication.factor"):
                if value.isdecimal():
                    self._put(f"kafka.{short.replace('.', '_')}", int(value))
                elif value != "-1":
                    self._say(name, f"It is no number: set kafka.{short.replace('.', '_')}.")
            elif short not in ("include", "exclude"):
                properties[short] = value
        if properties:
            self._put("kafka.topic_config", properties)
        self._put("kafka.conn_id", f"{self.made['name']}_kafka")
        self._partitions()
        self._format(flat)

    def _partitions(self) -> None:
        """What chooses records' partitions, of the tables whose topics a predicate names."""
        for name in split(self.given.get("transforms", "")):
            prefix = f"transforms.{name}"
            if self.given.get(f"{prefix}.type") != _ROUTING:
                continue
            given = split(self.given.get(f"{prefix}.partition.payload.fields", ""))
            fields = [re.fullmatch(r"(?:change|before|after)\.([^.]+)", each) for each in given]
            columns, tables = [each[1] for each in fields if each is not None], self._routed(name)
            if not tables or not columns or None in fields:
                self._say(
                    prefix,
                    "Which tables and columns are meant is not known: give the tables the option partition_by, which "
                    "takes columns of the key (docs/choose.md).",
                )
                continue
            for table in tables:
                self._options(table)["partition_by"] = columns
                if (count := self.given.get(f"{prefix}.partition.topic.num", "")).isdecimal():
                    self._options(table)["partitions"] = int(count)
            self._say(
                prefix,
                "The columns have to be in the tables' keys (partition_by). Their hash is another one, and so are the "
                "numbers of the partitions: give the pipeline topics of its own.",
            )

    def _routed(self, transformation: str) -> list[str]:
        """The tables whose topics the predicate of a transformation names; none if it cannot be said."""
        of = f"transforms.{transformation}"
        predicate = f"predicates.{self.given.get(f'{of}.predicate', '')}"
        negated = self.given.get(f"{of}.negate", "false") != "false"
        if negated or not self.given.get(f"{predicate}.type", "").endswith(".TopicNameMatches"):
            return []
        topics, prefix = as_patterns(self.given.get(f"{predicate}.pattern", "")), f"{self._take('topic.prefix')}."
        if topics is None or not all(each.startswith(prefix) and "." in each[len(prefix) :] for each in topics):
            return []
        return [each.removeprefix(prefix) for each in topics]

    def _format(self, flat: bool) -> None:
        converter = self.given.get("value.converter", "")
        registry = self.given.get("value.converter.schema.registry.url", "")
        formats = {"Avro": "", "JsonSchema": "json-schema", "Protobuf": "protobuf"}
        if (found := next((format for name, format in formats.items() if name in converter), None)) is not None:
            if found and flat:
                self._put("kafka.format", found)
            elif found:
                self._say(
                    "value.converter",
                    f"Envelopes are Avro or JSON: it is Avro, which has its schemas in the same registry. With {found} "
                    "(kafka.format), remove kafka.envelope: records are rows then.",
                )
            self._put("kafka.registry", f"{self.made['name']}_registry")
            url = re.sub(r"(https?://)[^/?#@\s,]*@", r"\1", registry)
            if url != registry or "@" in url:
                self._say("value.converter.schema.registry.url", f"It has a user and a password. {_NOT_HERE}")
            if url and "@" not in url:  # otherwise, it is not known where they end
                self._put("kafka.registry_properties", {"url": url})
        elif converter and "Json" not in converter:
            self._say(
                "value.converter", f"{converter} has no equal: the format is Avro, or with kafka.format: json, JSON."
            )
            self._put("kafka.registry", f"{self.made['name']}_registry")
        else:
            self._put("kafka.format", "json")
            if not converter:
                self._say(
                    "value.converter",
                    "It is that of Kafka Connect's worker, and taken for JSON with schemas, which is the default "
                    "there: see which one it is.",
                )
            with_schema = self.given.get("value.converter.schemas.enable", "true") == "true"
            if with_schema and flat:
                self._say("value.converter.schemas.enable", "Only envelopes have their schema in each record.")
            elif with_schema:
                self._put("kafka.envelope_schema", True)
        for name in ("key.converter", "key.converter.schemas.enable"):
            if name in self.given and self.given[name] != self.given.get(name.replace("key", "value"), ""):
                self._say(name, "Keys are in the format of the values.")
        if any("basic.auth" in name or "ssl" in name for name in self.given if name.startswith("value.converter.")):
            self._say(
                "value.converter.schema.registry", "Credentials belong into Airflow's connection, and are not here."
            )
        self._say("", "The Kafka servers are those of Kafka Connect's worker: give them in Airflow's connection, or as "
                      "kafka.properties.")  # fmt: skip

    def _values(self) -> None:
        for name, values in _VALUES.items():
            if name not in self.given:
                continue
            value = self._take(name)
            if (name, value, self.made["kafka"].get("format", "")[:4]) == ("binary.handling.mode", "base64", "json"):
                continue
            if value.lower() in values:
                if (put := values[value.lower()]) is not None:
                    self._put(*put)
            else:
                self._say(name, f"{value} has no equal. {_SAID[name]}")
        if (threads := self._take("snapshot.max.threads")).isdecimal() and int(threads):
            self._put("lanes", int(threads))
        if self.given.get("event.processing.failure.handling.mode", "fail") not in ("fail", ""):
            self._say("event.processing.failure.handling.mode", _SAID["event.processing.failure.handling.mode"])

    def _rest(self) -> None:
        """Whatever is left: what is known to make no difference, what has no equal, and what nobody here knows."""
        for name, value in sorted(self.given.items()):
            if name in self.seen:
                continue
            if name == "transforms":
                known = (_UNWRAP, _ROUTING, _OUTBOX)
                if _OUTBOX in self.given.values():
                    self._say(
                        name,
                        "Rows of an outbox become records by the option outbox of its table (docs/choose.md): "
                        "outbox.event.{aggregatetype}, in a pipeline of its own without kafka.topic_prefix, if its "
                        "topics are to have the connector's names.",
                    )
                others = [each for each in split(value) if self.given.get(f"transforms.{each}.type") not in known]
                if others:
                    self._say(name, f"{', '.join(others)}: there are no transformations. What they do to columns and "
                                    "topics may be said in table_options (docs/choose.md).")  # fmt: skip
            elif name in _SAID:
                self._say(name, _SAID[name])
            elif not name.startswith("transforms.") and not _NOT_NEEDED.fullmatch(name):
                self._say(name, "It has no equal, or is not known.")

    # ------------------------------------------------------------------ tools
    def _say(self, name: str, what: str) -> None:
        self.differences.append((name, what))

    def _take(self, name: str) -> str:
        self.seen.add(name)
        return self.given.get(name, "").strip()

    def _put(self, path: str, value: Any) -> None:
        *sections, name = path.split(".")
        at = self.made
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value

    def _mask(self, table: str, column: str, mask: str) -> None:
        self._options(table).setdefault("mask", {})[column] = mask

    def _options(self, table: str) -> dict[str, Any]:
        """The options of the tables of a pattern."""
        options = self.made.setdefault("source", {}).setdefault("table_options", {}).setdefault(table, {})
        assert isinstance(options, dict)
        return options

    def _patterns(self, name: str) -> list[str]:
        """A list of regular expressions as patterns with ``*``; what cannot be said so is said as a difference. The
        connector does not distinguish upper and lower case (io.debezium.function.Predicates)."""
        found = []
        for expression in split(self._take(name)):
            if (patterns := as_patterns(expression)) is None:
                self._say(
                    name, f"{expression!r} is a regular expression that no pattern with * and ? equals: add the names."
                )
                self.unclear |= name not in _INCLUDED
                continue
            if expression != expression.lower():
                self._say(name, f"{expression!r} has to be written as the database has it: upper and lower case count.")
            found += patterns
        return found

    def _table_patterns(self, name: str) -> list[str]:
        found = []
        for pattern in self._patterns(name):
            if not (tables := tables_of(pattern)):
                self._say(name, f"{pattern!r} names no table as schema.table.")
                self.unclear |= name not in _INCLUDED
            found += tables
        return found

    def _column_patterns(self, name: str) -> Iterator[tuple[str, str]]:
        for pattern in self._patterns(name):
            table, _, column = pattern.rpartition(".")
            if not table or (tables := tables_of(table)) == []:
                self._say(name, f"{pattern!r} names no column as schema.table.column.")
                self.unclear = True
                continue
            yield from ((each, column) for each in tables)


def _quoted(value: str) -> str:
    """A value of a connection string
    (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING-KEYWORD-VALUE)."""
    if re.fullmatch(r"[^\s'\\]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
