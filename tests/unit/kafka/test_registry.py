"""What the answers of a registry mean: which of them say something of a schema, and which of the registry."""

from __future__ import annotations

import httpx
import pytest
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused, SchemaRefused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.registry_errors import translate
from airflow_bottledwater.policy import ErrorAction, act


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
