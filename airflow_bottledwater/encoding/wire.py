"""The numbers that programs, kernels and their callers share, each with its source."""

from __future__ import annotations

# ---------------------------------------------------------------- opcodes: how one binary value becomes output
OP_BOOL = 1
OP_INT2 = 2
OP_INT4 = 3
OP_INT8 = 4
OP_FLOAT4 = 5
OP_FLOAT8 = 6
# the bytes are the text (text, varchar, bpchar, name, json, enum labels, converted values); argument 1: JSON text,
# unquoted; 2 (GEOJSON): the same, as ST_AsGeoJSON makes it
OP_TEXT = 7
GEOJSON = 2
OP_JSONB = 8  # a version byte 1, then text (jsonb_send, src/backend/utils/adt/jsonb.c); argument 1 as above
OP_BYTEA = 9
OP_UUID = 10
OP_DATE = 11
OP_TIME = 12
OP_TIMESTAMP = 13
OP_TIMESTAMPTZ = 14
OP_DECIMAL = 15  # numeric with a precision; argument 0: the Avro scale
OP_NUMERIC_TEXT = 16  # numeric without a precision; argument 1: as a JSON number
OP_UINT32 = 17  # oid, xid, cid
OP_UINT64 = 18  # xid8
OP_MONEY = 19  # argument: the scale of the server's currency
OP_TIMETZ = 20
OP_INTERVAL = 21
OP_INET = 22  # inet and cidr
OP_DOUBLE = 23  # numeric as the nearest double
OP_UINT32_TEXT = 24  # reg*: the number as text
OP_HEX = 25  # bytes; hexadecimal in JSON
OP_FLOATS = 26  # vector and halfvec; argument: bytes of an element
OP_MAP = 27  # hstore
OP_ISO = 28  # a date or time as ISO 8601 text; argument: the opcode of its number
OP_ENUM = 31  # argument: how many labels; children: the labels
# the following consist of other values, nested to any depth
OP_ARRAY = 32  # argument: the number of dimensions; child: the elements
OP_RECORD = 33  # argument: how many attributes; children: those
OP_RANGE = 34  # argument: 2; children: the bounds
OP_MULTIRANGE = 35  # child: the range

#: flags of a range (RANGE_EMPTY, RANGE_LB_INC, RANGE_UB_INC, RANGE_LB_INF, RANGE_UB_INF,
#: src/include/utils/rangetypes.h)
RANGE_EMPTY, RANGE_LOWER_INCLUSIVE, RANGE_UPPER_INCLUSIVE, RANGE_LOWER_INFINITE, RANGE_UPPER_INFINITE = 1, 2, 4, 8, 16

# ---------------------------------------------------------------- formats of a field, as pgoutput names them
#: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html (TupleData)
FIELD_NULL = ord("n")
FIELD_UNCHANGED = ord("u")
FIELD_TEXT = ord("t")
FIELD_BINARY = ord("b")
FIELD_CONVERTED = ord("s")  # not one of pgoutput's: the text to which the server has converted the value

# ---------------------------------------------------------------- messages of pgoutput, and the rows in them
#: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
MESSAGE_BEGIN, MESSAGE_COMMIT, MESSAGE_ORIGIN, MESSAGE_RELATION, MESSAGE_TYPE = b"BCORY"
MESSAGE_INSERT, MESSAGE_UPDATE, MESSAGE_DELETE, MESSAGE_TRUNCATE, MESSAGE_LOGICAL = b"IUDTM"
#: the byte before a TupleData: the new row, or the full old row; K, for the old key, is not needed
NEW_ROW, FULL_OLD_ROW = ord("N"), ord("O")

# ---------------------------------------------------------------- why a kernel could not encode a row
SPACE = -1  # the output buffer is full; not an error
MALFORMED = -2
NO_REPRESENTATION = -3
UNCHANGED = -4
CHANGED = -5
NO_KEY = -6
REASONS = {
    MALFORMED: "the value's bytes do not have the layout of its type",
    NO_REPRESENTATION: "the value has no representation in the column's output type",
    UNCHANGED: "the value was not sent (unchanged TOAST) and could not be found",
    NO_KEY: "a column of the key is NULL, as in the old row of a partition that had another replica identity "
    "than its table",
    CHANGED: "the value does not fit what the catalog says of its type (which an ALTER TYPE or ALTER TABLE has "
    "changed since)",
}

# ---------------------------------------------------------------- numbers of PostgreSQL
#: days and microseconds from 1970-01-01 to 2000-01-01 (POSTGRES_EPOCH_JDATE, src/include/datatype/timestamp.h)
EPOCH_DAYS = 10957
EPOCH_MICROS = 946_684_800_000_000
#: DATEVAL_NOEND/NOBEGIN and TIMESTAMP_INFINITY/MINUS_INFINITY (src/include/utils/date.h, datatype/timestamp.h)
DATE_INFINITY = 2**31 - 1
DATE_MINUS_INFINITY = -(2**31)
TIMESTAMP_INFINITY = 2**63 - 1
TIMESTAMP_MINUS_INFINITY = -(2**63)
#: an infinite interval (INTERVAL_NOEND, src/include/datatype/timestamp.h; since PostgreSQL 17): days and months at
#: their ends
INTERVAL_INFINITY = 2**31 - 1
INTERVAL_MINUS_INFINITY = -(2**31)
#: numeric's sign words (NUMERIC_NEG, _NAN, _PINF, _NINF in src/backend/utils/adt/numeric.c)
NUMERIC_NEGATIVE = 0x4000
NUMERIC_NAN = 0xC000
NUMERIC_PINF = 0xD000
NUMERIC_NINF = 0xF000

# ---------------------------------------------------------------- flags and events of a record
FLAG_REREAD = 1  # a TOAST value of the record was read again from the table
FLAG_XID_SHIFT = 8  # above it: the source transaction's 32-bit id
#: the values of the header op: a row of the snapshot, and the operations of the stream
EVENT_SNAPSHOT, EVENT_CREATE, EVENT_UPDATE, EVENT_DELETE = ord("r"), ord("c"), ord("u"), ord("d")
#: a logical message, of a transaction and of none
EVENT_MESSAGE, EVENT_MESSAGE_AT_ONCE = ord("m"), ord("n")

#: where a row that an envelope tells of comes from: the stream, the snapshot, or a live one
FROM_STREAM, FROM_SNAPSHOT, FROM_LIVE = range(3)

# ---------------------------------------------------------------- which headers records get
HEADERS = 1  # op and pos
HEADER_XID = 2

#: first byte of a Confluent-framed message, before the 4-byte schema id
MAGIC = 0
#: bytes of that frame, and with Protocol Buffers, one more for the place of the message in its file
#: (https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format)
SCHEMA_FRAME, PROTOBUF_FRAME = 5, 6
