"""Tables and their changes, for programs of others that read Debezium's envelope."""

from __future__ import annotations

TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, note text, cash numeric(10,2), at timestamptz, local timestamp,"
    " day date, time time, u uuid, doc jsonb, tags text[], raw bytea, ok boolean, ratio float8, span interval)",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
    # the identity is the key, and a large value is not sent again
    "CREATE TABLE parts (region text, id bigint, large text, n numeric, PRIMARY KEY (region, id))",
    "ALTER TABLE parts ALTER large SET STORAGE EXTERNAL",
)
_ROW = (
    "SELECT i, 'é' || i, i + 0.5, '2026-03-01 09:30:00.5+00', '2026-03-01 09:30:00.000001', '2026-03-01', '09:30',"
    " '00010203-0405-0607-0809-0a0b0c0d0e0f', '{\"a\":1}', '{a,NULL}', '\\x0102', true, 0.25, '1 day'"
)
ROWS = (
    f"INSERT INTO orders {_ROW} FROM generate_series(1, 200) i",
    "INSERT INTO parts SELECT 'r' || i % 3, i, repeat('x', 5000), i / 7.0 FROM generate_series(1, 200) i",
)
CHANGES = (
    f"INSERT INTO orders {_ROW} FROM generate_series(201, 300) i; INSERT INTO orders (id) VALUES (1000)",
    "UPDATE orders SET note = NULL, at = '1969-07-20 20:17:40+00', ok = false, tags = '{}' WHERE id % 3 = 0",
    "UPDATE orders SET id = id + 5000 WHERE id % 5 = 0",
    "DELETE FROM orders WHERE id % 7 = 0",
    "UPDATE parts SET n = -n WHERE id % 2 = 0; UPDATE parts SET region = 's' WHERE id % 5 = 0",
    "DELETE FROM parts WHERE id % 7 = 0; INSERT INTO parts VALUES ('r0', 0, NULL, NULL), ('r1', 7, 'again', 1)",
)
