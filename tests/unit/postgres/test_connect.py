"""What is said of a server that refuses a connection."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from psycopg import pq

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import connect
from tests.support.security import Authority


@pytest.mark.parametrize(
    ("dsn", "role"),
    [("user=cdc", '"cdc"'), ("user='Chänge \"data\".'", '"Chänge ""data""."'), ("", "…")],
)
def test_the_statements_for_a_role_that_may_not_replicate_quote_its_name(
    monkeypatch: pytest.MonkeyPatch, dsn: str, role: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("FATAL:  42501: keine Berechtigung, um den WAL-Sender zu starten")

    monkeypatch.setattr(psycopg.Connection, "connect", refuse)
    with pytest.raises(Refused) as raised:
        connect.connect(f"host=h {dsn}", application="test", replication=True)
    assert f"ALTER ROLE {role} REPLICATION (on RDS and Aurora: GRANT rds_replication TO {role})" in str(raised.value)


#: answers each connection with an error, or lets it in without a password if there is none; requests for encryption
#: (SSLRequest, GSSENCRequest) with no, or a third argument; a fourth one is the function that raised the error. In a
#: process of its own, since libpq's ping holds Python's lock
_SERVER = """
import socket, struct, sys
code, message, *encrypts = sys.argv[1:]
routine = f"Fauth.c\\0L1\\0R{encrypts.pop()}\\0" if encrypts[1:] else ""
fields = f"SВАЖНО\\0VFATAL\\0C{code}\\0M{message}\\0{routine}\\0".encode()
answer = b"E" + struct.pack(">I", len(fields) + 4) + fields if code else b"R" + struct.pack(">II", 8, 0)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    client, _ = listening.accept()
    while len(head := client.recv(8, socket.MSG_WAITALL)) == 8:
        if struct.unpack(">II", head)[1] in (80877103, 80877104):
            client.sendall((encrypts or ["N"])[0].encode())
            continue
        client.recv(struct.unpack(">II", head)[0] - 8, socket.MSG_WAITALL)
        client.sendall(answer)
        break
    client.close()
"""


@pytest.fixture
def refusing(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers each connection with an error (SQLSTATE, message) in its own language, or none; gives its
    connection string."""
    with subprocess.Popen([sys.executable, "-c", _SERVER, *request.param], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"host=127.0.0.1 port={int(server.stdout.readline())} dbname=x user=y"
        server.kill()


@pytest.mark.parametrize("refusing", [("57P03", "das Datenbanksystem startet")], indirect=True)
def test_a_server_that_starts_is_an_outage_in_every_language(refusing: str) -> None:
    with pytest.raises(Outage, match="startet"):
        connect.connect(refusing)


@pytest.mark.parametrize("refusing", [("53300", "tut mir leid, schon zu viele Verbindungen")], indirect=True)
def test_a_server_without_room_is_an_outage_in_every_language(refusing: str) -> None:
    with pytest.raises(Outage, match=r"schon zu viele Verbindungen \(SQLSTATE 53300\)\."):
        connect.connect(refusing)


@pytest.mark.parametrize("refusing", [("XX000", "could not fork new process for connection")], indirect=True)
def test_what_a_server_says_that_has_let_us_in_passes_unless_it_is_known_to_last(
    refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused):
        connect.connect(refusing)
    monkeypatch.setattr(connect, "_answered", {(connect.describe(refusing), "y")})
    with pytest.raises(Outage, match="could not fork"):
        connect.connect(refusing)


@pytest.mark.parametrize("refusing", [("28000", "роль не существует")], indirect=True)
def test_an_answer_is_known_in_every_language(refusing: str) -> None:
    with pytest.raises(Refused, match="роль"):
        connect.connect(refusing)
    # a server that answers is there
    silent = Mock(dsn=refusing)
    connect.Silence(silent).ask()


@pytest.mark.parametrize(
    ("function", "kind"), [("get_publication_oid", connect.PublicationMissing), ("lookup_ts_config_cache", Refused)]
)
def test_a_publication_that_is_missing_is_known_in_every_language(function: str, kind: type[Refused]) -> None:
    said = {pq.DiagnosticField.SOURCE_FUNCTION: function.encode()}
    error = psycopg.errors.UndefinedObject("Publikation »p« existiert nicht", info=said)
    assert type(connect.outage(error, "Replication")) is kind


@pytest.mark.parametrize(
    ("hint", "remedy"),
    [("»max_locks_per_transaction« erhöhen.", "raise max_locks_per_transaction"), ("", "")],
)
def test_a_full_lock_table_is_known_in_every_language(hint: str, remedy: str) -> None:
    said = {pq.DiagnosticField.SQLSTATE: b"53200", pq.DiagnosticField.MESSAGE_HINT: hint.encode()}
    found = connect.outage(psycopg.errors.OutOfMemory("Shared Memory aufgebraucht", info=said), "Reading rows")
    assert type(found) is Outage and remedy in found.remedy and bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    ("refusing", "kind"),
    [
        (("28P01", "Passwort-Authentifizierung fehlgeschlagen"), CredentialsRefused),
        (("28000", "Zertifikatauthentifizierung fehlgeschlagen", "N", "auth_failed"), CredentialsRefused),
        (("28000", "Rolle existiert nicht"), Refused),
        (("28000", "Verbindung benötigt ein gültiges Client-Zertifikat", "N", "ClientAuthentication"), Refused),
        (("3D000", "Datenbank existiert nicht"), Refused),
        (("42501", "keine Berechtigung für Datenbank"), Refused),
        (("55000", "Datenbank akzeptiert gegenwärtig keine Verbindungen"), Refused),
        (("08P01", "unsupported startup parameter: replication"), Refused),
    ],
    indirect=["refusing"],
)
def test_what_lasts_is_known_in_every_language(
    refusing: str, kind: type[Refused], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_answered", {(connect.describe(refusing), "y")})
    with pytest.raises(Refused) as raised:
        connect.connect(refusing)
    assert type(raised.value) is kind


@pytest.mark.parametrize("refusing", [("28000", "connection requires a valid client certificate")], indirect=True)
def test_a_certificate_that_was_not_there_to_be_sent_is_being_changed(refusing: str) -> None:
    with pytest.raises(CredentialsRefused, match="sslcert"):
        connect.connect(f"{refusing} sslcert=/nowhere/cdc.crt sslmode=disable")


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_CONNECT_TIMEOUT", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Outage, match="timeout expired"):
        connect.connect(f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x user=y")


def test_a_server_that_answers_is_shown_before_one_that_is_not_there() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, "28P01", "falsch"], stdout=subprocess.PIPE, text=True
        ) as server,
        socket.socket() as nobody,
    ):
        assert server.stdout is not None
        nobody.bind(("127.0.0.1", 0))
        ports = f"{nobody.getsockname()[1]},{int(server.stdout.readline())},{nobody.getsockname()[1]}"
        try:
            with pytest.raises(CredentialsRefused, match=r"falsch \(SQLSTATE 28P01\)\. Check user and password"):
                connect.connect(f"host=127.0.0.1,127.0.0.1,127.0.0.1 port={ports} dbname=x user=y")
        finally:
            server.kill()


@pytest.mark.parametrize(
    "parameter", ["connect_timeout=Ma9ker", "sslmode=Ma9ker", "port=99999", "service=Ma9ker", "keepalives=Ma9ker"]
)
def test_parameters_that_libpq_does_not_take_are_refused_for_good(parameter: str) -> None:
    with pytest.raises(Refused, match="connection string is not valid") as refused:
        connect.connect(f"host=127.0.0.1 {parameter}")
    assert not transient(refused.value) and "Ma9ker" not in str(refused.value)


#: a server that would encrypt, so that libpq loads the key; and one that lets everybody in
_ENCRYPTS, _OPEN = ("", "", "S"), ("", "")


@pytest.mark.parametrize(
    ("refusing", "parameters", "says", "remedy"),
    [
        (_ENCRYPTS, "sslkey={}/open.pem", "must have permissions u=rw (0600) or less", "with mode 0600"),
        (_ENCRYPTS, "sslkey={}/broken.pem", "could not load private key", "(sslkey)"),
        (_ENCRYPTS, "sslkey={}/absent.pem", "but not private key file", "(sslkey)"),
        (_OPEN, "sslrootcert=system", "weak sslmode", "Check sslmode"),
        (_OPEN, "sslmode=disable channel_binding=require", "channel binding required", "channel_binding"),
        (_OPEN, "sslmode=disable require_auth=scram-sha-256", "method requirement", "require_auth"),
        (_OPEN, "sslmode=disable gssencmode=require", "GSSAPI encryption", "gssencmode"),
    ],
    indirect=["refusing"],
)
def test_what_is_wrong_on_this_host_is_no_outage(
    refusing: str, parameters: str, says: str, remedy: str, tmp_path: Path
) -> None:
    key, certificate = Authority(tmp_path).issue("cdc")
    for name, mode, text in (("open", 0o644, key), ("broken", 0o600, "no key"), ("cert", 0o644, certificate)):
        (tmp_path / f"{name}.pem").write_text(text)
        (tmp_path / f"{name}.pem").chmod(mode)
    with pytest.raises(CredentialsRefused, match=re.escape(says)) as raised:
        connect.connect(f"sslmode=require sslcert={tmp_path}/cert.pem {refusing} {parameters.format(tmp_path)}")
    assert remedy in raised.value.remedy
    assert "sslkey" not in parameters or f"On this host ({socket.gethostname()})" in raised.value.remedy


@pytest.mark.parametrize("alert", ["tlsv1 alert unknown ca", "tlsv13 alert certificate required"])
def test_a_certificate_of_ours_that_the_server_does_not_accept_is_no_outage(alert: str) -> None:
    said = f'connection failed: connection to server at "127.0.0.1", port 5432 failed: SSL error: {alert}'
    found = connect._unconnected(psycopg.OperationalError(said), "host=127.0.0.1", {})
    assert isinstance(found, CredentialsRefused) and "sslcert" in found.remedy


@pytest.mark.parametrize("refusing", [("08P01", "unsupported startup parameter: replication")], indirect=True)
def test_a_pooler_that_refuses_replication_is_named(refusing: str) -> None:
    with pytest.raises(Refused, match=r"A connection pooler has answered\. Connect to the primary itself") as raised:
        connect.connect(refusing, replication=True)
    assert "pg_hba" not in str(raised.value)
