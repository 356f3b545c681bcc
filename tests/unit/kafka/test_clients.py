"""The properties of the connection, and which of them reach a client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused
from airflow_bottledwater.kafka import topics
from airflow_bottledwater.kafka.clients import (
    Heard,
    hear,
    made,
    producer_config,
    reader_config,
    transactional_config,
    translate,
)
from airflow_bottledwater.kafka.producer import TransactionalProducer
from airflow_bottledwater.kafka.topics import Topics

#: what a connection could have for other programs
THEIRS = {
    "bootstrap.servers": "k:9092",
    "transactional.id": "mine",
    "delivery.timeout.ms": "1",
    "message.timeout.ms": "1",
    "queue.buffering.max.kbytes": "1",
    "queue.buffering.max.messages": "1",
    "allow.auto.create.topics": "true",
    "compression.type": "zstd",
}


def test_a_record_is_neither_dropped_nor_kept_out_by_properties_of_the_connection() -> None:
    plain = producer_config(THEIRS)
    assert plain == {
        "bootstrap.servers": "k:9092", "compression.type": "zstd", "log_level": "2",
        "allow.auto.create.topics": "false",
    }  # fmt: skip
    own = {"transactional.id": "ours", "transaction.timeout.ms": "60000", "enable.idempotence": "true"}
    assert transactional_config(THEIRS, "ours", 60.0) == {**plain, **own}


@pytest.mark.parametrize(
    ("kind", "properties", "says"),
    [
        (Producer, {"compression.type": "brotli"}, "brotli"),
        (Producer, {"no.such": "1"}, "no.such"),
        # confluent-kafka wants a bool, which is no text
        (Producer, {"delivery.report.only.error": "true"}, "delivery.report.only.error"),
        (Consumer, {"fetch.max.bytes": "1000"}, "fetch.max.bytes"),
    ],
)
def test_a_property_that_a_client_does_not_take_is_refused(kind: Any, properties: dict[str, str], says: str) -> None:
    config = {"bootstrap.servers": "127.0.0.1:1", **properties}
    with pytest.raises(Refused, match=rf"does not accept a property: .*{says}"):
        made(kind, producer_config(config) if kind is Producer else reader_config(config))


@pytest.mark.parametrize("key", ["sasl.mechanism", "sasl.mechanisms"])
@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, True),
        ({"sasl.oauthbearer.method": "default"}, True),
        ({"sasl.oauthbearer.metadata.authentication.type": "aws_iam", "sasl.oauthbearer.method": "oidc"}, True),
        ({"enable.sasl.oauthbearer.unsecure.jwt": "true"}, False),
        (
            {
                "sasl.oauthbearer.metadata.authentication.type": "azure_imds",
                "sasl.oauthbearer.method": "OIDC",
                "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/",
            },
            False,
        ),
        ({"security.protocol": "SSL"}, False),  # the mechanism is not used
    ],
)
def test_a_client_that_would_wait_for_a_token_for_ever_is_refused(
    key: str, more: dict[str, str], refused: bool
) -> None:
    config = {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "sasl_ssl", key: "OAUTHBEARER", **more}
    with pytest.raises(Refused, match="nothing that makes a token") if refused else contextlib.nullcontext():
        Topics(config)


def test_a_quota_that_is_used_up_is_said() -> None:
    error = KafkaException(KafkaError(KafkaError.THROTTLING_QUOTA_EXCEEDED))
    said = translate(error, {"bootstrap.servers": "k:1"})
    assert isinstance(said, Outage) and "quota controller_mutation_rate" in said.remedy and "address" not in str(said)


@pytest.fixture
def not_kafka() -> Iterator[str]:
    """The address of a server that answers whatever it is sent with a line of text."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with contextlib.closing(server.accept()[0]) as client:
                    client.sendall(b"hello\r\n")
                    client.recv(1000)

    threading.Thread(target=answer, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


def _outage(monkeypatch: pytest.MonkeyPatch, config: dict[str, str]) -> str:
    monkeypatch.setattr(topics, "_TIMEOUT", 1.0)
    with pytest.raises(Outage) as raised:
        Topics(config).brokers()
    assert str(raised.value).startswith(f"Kafka at {config['bootstrap.servers']} does not answer: ")
    assert "Check the address in the connection (or --broker)" in raised.value.remedy
    return str(raised.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"security.protocol": "SSL"}, "wrong version number"),
        (
            {
                "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER",
                "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "me",
                "sasl.oauthbearer.client.secret": "s3cret",
                "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/token",
            },
            "Failed to acquire SASL OAUTHBEARER token",
        ),
    ],
    ids=["TLS towards a listener without", "no token"],
)  # fmt: skip
def test_an_outage_has_what_the_client_says_of_its_connections(
    monkeypatch: pytest.MonkeyPatch, not_kafka: str, more: dict[str, str], says: str
) -> None:
    text = _outage(monkeypatch, {"bootstrap.servers": not_kafka, **more})
    assert says in text.partition(". The client says: ")[2]
    assert "s3cret" not in text and "advertised" not in text


def test_an_outage_names_a_host_that_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _outage(monkeypatch, {"bootstrap.servers": "kafka.invalid:9092"})
    assert "kafka.invalid:9092/bootstrap: Failed to resolve 'kafka.invalid:9092'" in text and "advertised" not in text


def test_a_producer_waits_with_what_the_client_says(not_kafka: str) -> None:
    waited: list[object] = []

    class Enough(Exception):
        pass

    def waiting(what: object) -> None:
        waited.append(what)
        if "The client says" in str(what) or len(waited) > 10:
            raise Enough

    config = {"bootstrap.servers": not_kafka, "security.protocol": "SSL"}
    with pytest.raises(Enough):
        TransactionalProducer(config, "bottledwater-t", ["t"], transaction_timeout=10.0, waiting=waiting).open()
    assert "Kafka does not answer: " in str(waited[-1]) and "wrong version number" in str(waited[-1])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("localhost:9092/1: Connect to ipv4#127.0.0.1:9092 failed: Connection refused", "localhost:9092"),
        ("sasl_ssl://kafka-0.kafka:9093/100: Failed to resolve 'kafka-0.kafka:9093': unknown", "kafka-0.kafka:9093"),
        ("sasl_ssl://[::1]:9093/1: Connect to ipv6#[::1]:9093 failed: refused", "[::1]:9093"),
        ("localhost:9092/bootstrap: Connect to ipv4#127.0.0.1:9092 failed: Connection refused", ""),
        ("Failed to acquire SASL OAUTHBEARER token: http://idp:80/1: no", ""),
    ],
)
def test_an_address_that_the_brokers_tell_is_told_from_that_of_the_connection(text: str, told: str) -> None:
    heard = Heard()
    assert heard.reason() == ""
    hear(heard, KafkaError(KafkaError._TRANSPORT, f"{text} (after 3ms in state CONNECT)"))
    # says nothing that the calls do not say
    hear(heard, KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    said = heard.reason()
    assert said.startswith(f" The client says: {text}.") and "3ms" not in said
    assert (f" {told} is an address that the brokers tell their clients" in said) == bool(told)
    assert ("advertised.listeners" in said) == bool(told)


def test_a_failure_of_long_ago_is_not_the_reason_of_an_outage() -> None:
    heard = Heard()
    hear(heard, KafkaError(KafkaError._TRANSPORT, "k:9092/1: Disconnected"))
    assert "Disconnected" in heard.reason() and "Disconnected" in heard.reason()
    heard.at -= 61
    assert heard.reason() == ""


@pytest.mark.parametrize(
    ("code", "text", "refused"),
    [
        (KafkaError._AUTHENTICATION, "sasl_ssl://k:9093/1: SASL authentication error: Authentication failed", True),
        (KafkaError._AUTHENTICATION, "sasl_ssl://k:9093/1: Unsupported SASL mechanism", True),
        # what a broker said on TLS 1.2 and 1.3
        (
            KafkaError._SSL,
            "ssl://k:9093/1: SSL handshake failed: error:0A000086:SSL routines::certificate verify",
            True,
        ),
        (KafkaError._SSL, "ssl://k:9093/1: SSL handshake failed: error:0A000412::ssl/tls alert bad certificate:", True),
        (KafkaError._TRANSPORT, "ssl://k:9093/1: Receive failed: error:0A000412::ssl/tls alert bad certificate:", True),
        (KafkaError._TRANSPORT, "ssl://k:9093/1: Receive failed: error:0A000418::tlsv1 alert unknown ca: SSL", True),
        (
            KafkaError._SSL,
            "ssl://k:9093/1: SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker?",
            False,
        ),
        (
            KafkaError._AUTHENTICATION,
            "sasl_ssl://k:9093/1: SASL SCRAM-SHA-256 mechanism handshake failed: Local: Broker transport failure: n/a",
            False,
        ),
        (KafkaError._AUTHENTICATION, "Failed to acquire SASL OAUTHBEARER token: Local: Timed out: idp", False),
        (KafkaError._TRANSPORT, "ssl://certificates:9093/1: Connect to ipv4#10.0.0.1:9093 failed: refused", False),
        (KafkaError._RESOLVE, "ssl://k:9093/1: Failed to resolve 'certificates:9093': unknown", False),
    ],
)
def test_who_is_refused_is_told_from_who_has_no_answer(code: int, text: str, refused: bool) -> None:
    heard = Heard()
    hear(heard, KafkaError(code, f"{text} (after 2ms in state SSL_HANDSHAKE)"))
    found = heard.outage("Kafka does not answer.", {"bootstrap.servers": "k:9093"})
    if refused:
        assert isinstance(found, CredentialsRefused) and found.what.endswith(f"refuses the connection: {text}.")
    else:
        assert found == f"Kafka does not answer. The client says: {text}." or "advertised.listeners" in str(found)
    # the next outage may be a real one, and a refusal of long ago may have been mended
    assert isinstance(heard.outage("Kafka does not answer", {}), str)
    hear(heard, KafkaError(code, text))
    heard.refused -= 61
    assert isinstance(heard.outage("Kafka does not answer", {}), str)
