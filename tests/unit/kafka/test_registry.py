"""What the answers of a registry mean: which of them say something of a schema, and which of the registry."""

from __future__ import annotations

import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest
from confluent_kafka.schema_registry import RegisteredSchema, Schema
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.encoding import avro, json_schema, protobuf
from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused, SchemaRefused, StopRequested
from airflow_bottledwater.kafka import registry
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.registry_errors import translate
from airflow_bottledwater.policy import ErrorAction, act
from tests.support import wire as w
from tests.support.reference import RECORD
from tests.support.security import Authority


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, 409, SchemaRefused),
        (409, 40901, SchemaRefused),
        (422, 42201, SchemaRefused),  # no valid schema
        (422, 42209, SchemaRefused),  # too large
        (422, 42202, Refused),  # version
        (422, 42203, Refused),  # level
        (422, 42204, Refused),  # mode
        (422, 42205, Outage),  # read-only, or in another mode
        (422, 42206, Refused),  # a reference exists
        (422, 42207, Refused),  # another id
        (422, 42208, Refused),  # subject
        (422, -1, Refused),
        (401, 40101, CredentialsRefused),
        (403, 40301, Refused),
        (404, 404, Refused),
        (429, 42901, Outage),
        (500, 50001, Outage),
        (500, 50003, Outage),
        (502, -1, Outage),
    ],
)
def test_only_what_is_said_of_the_schema_can_be_a_rows_fault(status: int, code: int, kind: type[BaseException]) -> None:
    error = translate(SchemaRegistryError(status, code, "why"), "http://registry", "t-value")
    assert type(error) is kind
    assert "http://registry" in str(error)
    assert act(error) is (ErrorAction.WAIT if kind is Outage else ErrorAction.END)


def test_a_registry_that_does_not_answer_is_an_outage() -> None:
    error = translate(httpx.ConnectError("refused"), "http://registry", "t-value")
    assert type(error) is Outage
    assert "does not answer: ConnectError: refused" in str(error)


def test_a_certificate_that_is_not_accepted_is_no_outage() -> None:
    error = translate(
        httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
        "https://registry",
        "t-value",
    )
    assert type(error) is CredentialsRefused
    assert "self-signed certificate" in error.what and "set ssl.ca.location" in error.remedy


def test_what_is_full_says_so() -> None:
    text = "Schemas limit exceeded"
    assert text in str(translate(SchemaRegistryError(403, 40301, text), "http://registry", "t-value"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:pa/ss@host", ""),
        ("u:pa-ss@host:8081", ""),
        ("http://u:pa#ss@host", ""),
        ("http://u:pa?ss@host", ""),
        ("http://u:pa@ss@host", ""),
        ("http://u:pa,ss@host", ""),
        ("http://u:pass", ""),
        ("http://u:pa ss@host", ""),
        ("", ""),
        ("http://u:p%2Fa@host:8081/apis/ccompat/v7/", "http://host:8081/apis/ccompat/v7/"),
        ("https://host", "https://host"),
        ("http://u:p@[::1]:8081, http://other:8081", "http://[::1]:8081,http://other:8081"),
    ],
)
def test_no_part_of_a_password_in_a_url_is_shown(url: str, shown: str) -> None:
    if shown:
        assert Registry({"url": url}).url == shown
        return
    with pytest.raises(Refused, match=r"not valid\. .*basic\.auth\.user\.info") as raised:
        Registry({"url": url})
    assert "pa" not in str(raised.value).partition(" It is ")[0] and "host:" not in str(raised.value)


def test_a_process_makes_one_client_for_a_registry() -> None:
    config = {"url": "http://registry"}
    assert Registry(config)._client is Registry(dict(config))._client
    assert Registry(config)._client is not Registry({**config, "basic.auth.user.info": "user:password"})._client


def test_certificates_that_are_exchanged_are_read_anew(tmp_path: Path) -> None:
    file = Authority(tmp_path).certificate
    asked = Registry({"url": "https://registry", "ssl.ca.location": str(file)})
    first = asked._client
    content = Authority(tmp_path, "new").certificate.read_bytes()
    # half of the new file is there, or it is not there for a moment
    for left in (content[:40], b""):
        file.write_bytes(left) if left else file.unlink()
        assert asked._client is first
    file.write_bytes(content)
    assert asked._client is not first and asked._client is asked._client


def test_a_registry_that_does_not_accept_the_clients_certificate_refuses_it() -> None:
    for alert in ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA"):
        error = translate(ssl.SSLError(1, f"[SSL: {alert}] alert (_ssl.c:2580)"), "https://registry", "")
        assert isinstance(error, CredentialsRefused) and "ssl.certificate.location" in error.remedy
    assert isinstance(translate(OSError("[SSL: TLSV1_ALERT_INTERNAL_ERROR]"), "https://registry", ""), Outage)


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location"])
@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_of_certificates_that_cannot_be_used_is_named_with_its_setting(
    tmp_path: Path, name: str, content: str | None
) -> None:
    path = tmp_path / "registry.pem"
    if content is not None:
        path.write_text(content)
    registry = Registry({"url": "https://127.0.0.1:9", name: str(path)})
    with pytest.raises(Refused, match=rf"Schema registry setting: {name} = {path} cannot be used on host ") as raised:
        registry.ping()
    assert act(raised.value) is ErrorAction.END


def test_the_file_that_is_missing_is_named_of_several(tmp_path: Path) -> None:
    (tmp_path / "ca").touch()
    config = {"ssl.ca.location": str(tmp_path / "ca"), "ssl.certificate.location": str(tmp_path / "none")}
    with pytest.raises(Refused, match=rf"setting: ssl.certificate.location = {tmp_path}/none cannot be used"):
        Registry({"url": "https://127.0.0.1:9", **config}).ping()


def test_a_file_that_the_environment_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(Refused, match=r"setting: SSL_CERT_FILE = /nowhere/ca\.pem cannot be used"):
        Registry({"url": "https://127.0.0.1:7"}).ping()


NUMBERS = [
    "timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "cache.capacity", "cache.latest.ttl.sec",
]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_among_the_properties_is_one(name: str) -> None:
    """A connection's extra, and the properties of a pipeline, are texts."""
    with pytest.raises(Outage, match="does not answer: ConnectError"):
        Registry({"url": "http://127.0.0.1:9", "max.retries": "0", "retries.wait.ms": "1", name: "2"}).ping()
    for wrong in ("many", "", "-1", "nan", "inf", "1s"):
        with pytest.raises(Refused, match=f"Schema registry setting: {name} cannot be '{wrong}'"):
            Registry({"url": "http://127.0.0.1:9", name: wrong})


@pytest.mark.parametrize(("name", "value"), [("no.such", "1"), ("proxy", "nowhere"), ("basic.auth.user.info", "me")])
def test_a_property_that_the_client_does_not_take_is_no_outage(name: str, value: str) -> None:
    with pytest.raises(Refused, match="Schema registry setting"):
        Registry({"url": "http://127.0.0.1:9", name: value}).ping()


class Contexts:
    """A client of a registry with contexts, each of which counts its ids (RestApiContextTest of Confluent's): a subject
    that the default context does not have is looked up in the others."""

    def __init__(self, *here: str, context: str = "") -> None:
        self.context, self.here, self.there = context, [*here], ["staging's"]

    def clear_caches(self) -> None:
        pass

    def _registered(self, subject: str, number: int, schema: Schema) -> RegisteredSchema:
        return RegisteredSchema(subject, 1, number, None, schema)

    def lookup_schema(self, subject: str, schema: Schema) -> RegisteredSchema:
        if schema.schema_str in self.here:
            return self._registered(f"{self.context}{subject}", 1 + self.here.index(schema.schema_str), schema)
        if not self.context and not self.here:
            return self._registered(f":.staging:{subject}", 7, schema)
        raise SchemaRegistryError(404, 40401, "no such subject")

    def get_latest_version(self, subject: str) -> RegisteredSchema:
        if not self.here and not self.context:
            return self._registered(f":.staging:{subject}", 7, Schema(self.there[0], "PROTOBUF"))
        raise SchemaRegistryError(404, 40401, "no such subject")

    def register_schema(self, subject: str, schema: Schema) -> int:
        self.here.append(str(schema.schema_str))
        return len(self.here)

    def get_schema(self, number: int) -> Schema:
        if number > len(self.here):
            raise SchemaRegistryError(404, 40403, "no such schema")
        return Schema(self.here[number - 1], "AVRO")

    def get_versions(self, subject: str) -> list[int]:
        raise SchemaRegistryError(404, 40401, "no such subject")

    def get_subjects(self) -> list[str]:
        return [":.staging:theirs", f"{self.context}ours"]

    def get_mode(self, subject: str) -> str:
        return "READWRITE"


def at(url: str, client: Contexts, monkeypatch: pytest.MonkeyPatch, kind: str = "AVRO") -> Registry:
    monkeypatch.setattr(registry, "_shared_client", lambda _: client)
    return Registry({"url": url}, kind)


def test_the_id_of_another_context_is_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Contexts()
    here = at("http://sr", client, monkeypatch)
    assert here.lookup("t-value", '"int"') is None
    assert here.restore("t-value", '"int"', 7) is None
    assert here.register("t-value", '"int"') == 1
    assert client.here == ['"int"'] and here.lookup("t-value", '"int"') == 1


def test_the_schema_of_another_context_is_no_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no field whose number has to be kept."""
    here = at("http://sr", Contexts(), monkeypatch, "PROTOBUF")
    assert here._amended("t-value", "ours") == "ours"


class Versions(Contexts):
    """A client of a registry that has several versions of each subject, at the level ``BACKWARD``."""

    def get_versions(self, subject: str) -> list[int]:
        return [*range(1, len(self.here) + 1)]

    def get_version(self, subject: str, number: int) -> RegisteredSchema:
        return self._registered(subject, number, Schema(self.here[number - 1], "AVRO"))

    def get_latest_version(self, subject: str) -> RegisteredSchema:
        return self.get_version(subject, len(self.here))

    def get_compatibility(self, subject: str) -> str:
        return "BACKWARD"


_SCHEMAS = {
    "AVRO": (avro.value_schema, avro.key_schema),
    "PROTOBUF": (protobuf.value_schema, protobuf.key_schema),
    "JSON": (json_schema.value_schema, json_schema.key_schema),
}


def schema(kind: str, *columns: tuple[str, int], of_key: bool = False) -> str:
    """The schema of rows with these columns and types, or of their keys, the first column."""
    table = w.table(*((name, w.plain(oid)) for name, oid in columns), key=(columns[0][0],))
    return _SCHEMAS[kind][of_key](table, RECORD)


@pytest.mark.parametrize("kind", ["AVRO", "PROTOBUF", "JSON"])
def test_what_the_latest_version_has_is_no_reason_to_refuse_a_later_change(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, data, text, later = ("id", w.INT4), ("v", 17), ("v", w.TEXT), ("later", w.INT4)
    client = Versions(schema(kind, key, data))
    here = at("http://sr", client, monkeypatch, kind)
    with pytest.raises(SchemaRefused, match="between it and version 1, readers would read v"):
        here.register("t-value", schema(kind, key, text))
    # it was registered at the level NONE
    client.here.append(schema(kind, key, text))
    # going back to what the subject has is no change that is compared
    assert here.register("t-value", schema(kind, key, data)) == 1
    assert here.register("t-value", schema(kind, key, text, later)) == 3
    with pytest.raises(SchemaRefused, match="between it and version 2, readers would read v"):
        here.register("t-value", schema(kind, key, data, later))


def test_a_field_that_was_gone_meanwhile_is_compared_with_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry itself compares with the latest version."""
    key = ("id", w.INT4)
    here = at("http://sr", Versions(schema("AVRO", key, ("v", 17)), schema("AVRO", key)), monkeypatch)
    with pytest.raises(SchemaRefused, match="between it and version 1, readers would read v"):
        here.register("t-value", schema("AVRO", key, ("v", w.TEXT)))


def test_many_versions_are_asked_for_several_at_a_time_and_never_more_than_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, most = set[int](), list[int]()

    class Slow(Versions):
        def get_version(self, subject: str, number: int) -> RegisteredSchema:
            asking.add(threading.get_ident())
            most.append(len(asking))
            time.sleep(0.01)
            asking.discard(threading.get_ident())
            return super().get_version(subject, number)

    columns = [("id", w.INT4), *((f"c{i}", w.TEXT) for i in range(40))]
    here = at("http://sr", Slow(*(schema("AVRO", *columns[: i + 1]) for i in range(40))), monkeypatch)
    monkeypatch.setattr(here, "_compared", lambda _: ())
    assert here.check_all([(f"t{i}-value", schema("AVRO", *columns)) for i in range(4)]) == [False] * 4
    assert len(most) == 160 and 1 < max(most) <= registry._AT_ONCE


@pytest.mark.parametrize("kind", ["AVRO", "PROTOBUF", "JSON"])
def test_the_schema_of_a_key_has_its_columns_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the key before would be NULL in the primary key of a consumer's table."""
    before, now = (schema(kind, (name, w.INT4), of_key=True) for name in ("id", "number"))
    client = Versions(before)
    assert at("http://sr", client, monkeypatch, kind).register("t-key", now) == 2
    assert client.here == [before, now]


@pytest.mark.parametrize(
    ("url", "context"),
    [
        ("http://sr", ""),
        ("http://u:p@sr:8081/contexts/.prod", ":.prod:"),
        ("http://sr/contexts/:.prod:", ":.prod:"),
        ("http://sr/contexts/.prod/,http://other/contexts/.prod", ":.prod:"),
    ],
)
def test_the_subjects_of_the_urls_own_context_are_known_by_their_names(
    url: str, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = at(url, Contexts('"int"', context=context), monkeypatch)
    assert here.subjects() == {":.staging:theirs", "ours"}
    assert here.lookup("ours", '"int"') == 1


class Unseen(Contexts):
    """A client whose user may not see modes and levels, or of a registry that has none."""

    def __init__(self, status: int, code: int) -> None:
        super().__init__()
        self.error = SchemaRegistryError(status, code, "why")

    def get_mode(self, subject: str) -> str:
        raise self.error

    get_compatibility = get_mode


@pytest.mark.parametrize(("status", "code"), [(403, 40301), (404, 404)])
def test_a_mode_or_a_level_that_is_not_told_is_none_that_permits_anything(
    status: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = at("http://sr", Unseen(status, code), monkeypatch)
    assert here.restore("t-value", '"int"', 7) is None
    assert here._level("t-value") == ""


def test_a_password_that_is_refused_is_told_when_the_mode_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CredentialsRefused):
        at("http://sr", Unseen(401, 40101), monkeypatch).restore("t-value", '"int"', 7)
    with pytest.raises(CredentialsRefused):
        at("http://sr", Unseen(401, 40101), monkeypatch).check_all([("t-value", '"long"')])


class Importing(Contexts):
    """A client of a registry in the mode IMPORT whose ids are taken."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def get_mode(self, subject: str) -> str:
        return "IMPORT"

    def register_schema(self, subject: str, schema: Schema) -> int:
        raise SchemaRegistryError(422, self.code, "Overwrite new schema with id 7 is not permitted.")


@pytest.mark.parametrize("code", [42205, 42207])
def test_an_id_that_is_taken_cannot_be_given_back_and_is_not_waited_for(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = at("http://sr", Importing(code), monkeypatch)
    assert here.restore("t-value", '"int"', 7) is None
    with pytest.raises(Refused if code == 42207 else Outage):
        here.register("t-value", '"int"')


@pytest.mark.parametrize("refusals", [2, 9])
def test_a_registry_that_gets_too_many_requests_is_asked_more_slowly(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, slept = Contexts('"int"'), list[float]()
    answers = iter([SchemaRegistryError(429, 42901, "Rate limit exceeded")] * refusals)

    def get_schema(number: int) -> Schema:
        if (error := next(answers, None)) is not None:
            raise error
        return Schema('"int"', "AVRO")

    monkeypatch.setattr(client, "get_schema", get_schema)
    monkeypatch.setattr(registry, "pause", slept.append)
    here = at("http://sr", client, monkeypatch)
    if refusals == 2:
        assert here.schema(1) == '"int"' and len(slept) == 2
        return
    with pytest.raises(Outage, match=r"gets more requests than it takes: .*raise the limit"):
        here.schema(1)
    assert len(slept) == 5


def test_a_job_that_is_asked_to_stop_does_not_wait_for_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the thread that is asked to, nor in those that ask for it."""
    client, stopped = Contexts('"int"'), threading.Event()

    def refuse(*_: object) -> None:
        stopped.set()
        raise SchemaRegistryError(429, 42901, "Rate limit exceeded")

    monkeypatch.setattr(client, "get_latest_version", refuse)
    monkeypatch.setattr(client, "lookup_schema", refuse)
    here = at("http://sr", client, monkeypatch)
    monkeypatch.setattr(registry, "_SLOWER", (3.0,))
    for ask in (lambda: here.lookup("t-value", '"int"'), lambda: here.register_all([("t-value", '"int"')])):
        stopped.clear()
        with stoppable(stopped), pytest.raises(StopRequested):
            ask()
