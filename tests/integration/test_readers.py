"""What readers make of records when they have another schema than the writer: Avro's own reader in Java, for each two
types that this package publishes."""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError

from airflow_bottledwater.encoding.meaning import misread
from airflow_bottledwater.local.artifacts import installed, system_java


def _logical(base: str, name: str, **more: int) -> dict[str, Any]:
    return {"type": base, "logicalType": name, **more}


#: the types without parts that encoding/types.py publishes, each with a value
TYPES: list[tuple[Any, Any]] = [
    ("boolean", True),
    ("int", 70),
    ("long", 70),
    ("float", 70.0),
    ("double", 70.0),
    ("string", "70"),
    ("bytes", b"70"),
    (_logical("string", "uuid"), UUID(int=70)),
    (_logical("int", "date"), date(1970, 3, 12)),
    (_logical("long", "time-micros"), time(0, 0, 0, 70)),
    (_logical("long", "timestamp-micros"), datetime(1970, 1, 1, 0, 0, 0, 70, UTC)),
    (_logical("long", "local-timestamp-micros"), datetime(1970, 1, 1, 0, 0, 0, 70)),
    (_logical("bytes", "decimal", precision=10, scale=2), Decimal("12.34")),
    (_logical("bytes", "decimal", precision=12, scale=2), Decimal("12.34")),
    (_logical("bytes", "decimal", precision=12, scale=4), Decimal("12.34")),
    ({"type": "enum", "name": "mood", "symbols": ["sad", "ok"]}, "ok"),
    ({"type": "enum", "name": "mood", "symbols": ["ok", "glad", "sad"]}, "ok"),
]


@pytest.fixture(scope="module")
def avro() -> Iterator[Any]:
    """Avro's packages in a JVM, as PySpark brings them."""
    jars = str(installed("pyspark") / "jars" / "avro-1*.jar")
    (jar,) = glob.glob(jars)
    others = [
        path for name in ("jackson", "commons", "slf4j") for path in glob.glob(str(Path(jar).parent / f"{name}*"))
    ]
    port = launch_gateway(classpath=":".join([jar, *others]), die_on_exit=True, java_path=str(system_java()))
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm.org.apache.avro
    gateway.shutdown()


def schema(kind: Any) -> str:
    fields = [{"name": "a", "type": ["null", kind], "default": None}]
    return json.dumps({"type": "record", "name": "t", "fields": fields})


def conversions(avro: Any) -> Any:
    """What makes values of Java's own types of logical ones."""
    data = avro.generic.GenericData()
    for name in ("DecimalConversion", "UUIDConversion"):
        data.addLogicalTypeConversion(getattr(avro, f"Conversions${name}")())
    for name in ("Date", "TimeMicros", "TimestampMicros", "LocalTimestampMicros"):
        data.addLogicalTypeConversion(getattr(avro.data, f"TimeConversions${name}Conversion")())
    return data


def read(avro: Any, data: Any, written: Any, reader: Any, value: bytes) -> Any:
    """The value as Java reads it; None if it raises an error. A number is a number whatever its class, and so is a
    text."""
    one, other = (getattr(avro, "Schema$Parser")().parse(schema(each)) for each in (written, reader))
    decoder = avro.io.DecoderFactory.get().binaryDecoder(value, None)
    try:
        got = avro.generic.GenericDatumReader(one, other, data).read(None, decoder).get("a")
        if not hasattr(got, "getClass"):
            return got
        name, shown = got.getClass().getSimpleName(), got.toString()
    except Py4JJavaError:
        return None
    return shown if name in ("Utf8", "UUID", "EnumSymbol") else (name, shown)


def test_what_is_told_is_what_java_takes_for_something_else(avro: Any) -> None:
    told, silent, data = set(), set(), conversions(avro)
    for n, (written, value) in enumerate(TYPES):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, json.loads(schema(written)), {"a": value})
        meant = read(avro, data, written, written, out.getvalue())
        assert meant is not None
        for m, (reader, _) in enumerate(TYPES):
            got = read(avro, data, written, reader, out.getvalue())
            its_bytes = isinstance(meant, str) and isinstance(got, tuple) and got[0] == "HeapByteBuffer"
            if got is not None and got != meant and not its_bytes:
                silent.add((n, m))
            if misread(schema(written), schema(reader)):
                told.add((n, m))
    assert len(silent) > 40
    assert silent <= told
    # a text that is no UUID is an error, one that is would be misread
    assert {json.dumps(TYPES[m][0]) for _, m in told - silent} == {json.dumps(_logical("string", "uuid"))}


@pytest.mark.parametrize(
    ("kind", "number", "java"),
    [
        (_logical("int", "date"), 2**31 - 1, ("LocalDate", "+5881580-07-11")),
        (_logical("int", "date"), 2_932_897, ("LocalDate", "+10000-01-01")),
        (_logical("int", "date"), -735_160, ("LocalDate", "-0043-03-15")),
        (_logical("long", "time-micros"), 86_400_000_000, None),
        (_logical("long", "timestamp-micros"), 2**63 - 1, ("Instant", "+294247-01-10T04:00:54.775807Z")),
        (_logical("long", "local-timestamp-micros"), 2**63 - 1, ("LocalDateTime", "+294247-01-10T04:00:54.775807")),
    ],
)
def test_what_readers_make_of_dates_that_their_own_types_do_not_have(
    avro: Any, kind: dict[str, Any], number: int, java: Any
) -> None:
    """As the table in docs/message-format.md says; as numbers without logical types they are read by all."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, json.loads(schema(kind["type"])), {"a": number})
    with pytest.raises((OverflowError, ValueError)):
        fastavro.schemaless_reader(io.BytesIO(out.getvalue()), json.loads(schema(kind)), None)
    assert read(avro, conversions(avro), kind, kind, out.getvalue()) == java
    plain = fastavro.schemaless_reader(io.BytesIO(out.getvalue()), json.loads(schema(kind["type"])), None)
    assert (
        plain == {"a": number} and read(avro, conversions(avro), kind["type"], kind["type"], out.getvalue()) == number
    )
