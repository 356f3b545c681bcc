"""The schema registry. Of a job, only the driver uses it; but workers that verify a topic read the schemas that its
records name."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_bottledwater.backoff import pause, threads
from airflow_bottledwater.errors import CredentialsRefused, Refused, SchemaRefused
from airflow_bottledwater.kafka.registry_errors import ID_NOT_GIVEN, SCHEMA_NOT_THERE, TOO_MANY_REQUESTS, translate
from airflow_bottledwater.pipeline.settings import Settings

# the client takes a fifth of a second to import, and few jobs have a schema to register
if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    from airflow_bottledwater.encoding.meaning import Meaning

_Answer = TypeVar("_Answer")
_Setting = Callable[["SchemaRegistryClient"], str]

log = logging.getLogger(__name__)

#: requests at the same time, of all threads
_AT_ONCE = 8
_ASKING = threading.BoundedSemaphore(_AT_ONCE)
#: seconds after which a question is asked again that the registry refuses because it gets too many in a second
_SLOWER = (1.0, 2.0, 4.0, 8.0, 16.0)


_Options = tuple[tuple[str, Any], ...]
#: the clients that were made last, by their properties, each with when the files that these name had been changed
_clients: dict[_Options, tuple[tuple[int, ...], SchemaRegistryClient]] = {}
_KEEP = 4
#: properties that name files of certificates and keys
_FILE = re.compile(r"ssl\..*\.location")


def _shared_client(options: _Options) -> SchemaRegistryClient:
    """The client with these properties. A process makes it once: each one reads the certificates of all
    authorities, of which 150 kB stay in malloc's caches of a thread when it is gone. It is made anew when a file of
    certificates was exchanged, which it reads only then; unless that cannot be read yet."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    changed = tuple(_changed(str(value)) for name, value in options if _FILE.fullmatch(name))
    known = _clients.get(options)
    if known is not None and known[0] == changed:
        return known[1]
    for library in ("httpx", "httpx2"):  # would log each request
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        made = SchemaRegistryClient(dict(options))
    except OSError:
        if known is None:
            raise
        return known[1]
    _clients[options] = changed, made
    for unused in [*_clients][:-_KEEP]:
        _clients.pop(unused, None)
    return made


def _changed(file: str) -> int:
    """When a file was changed, in nanoseconds since 1970; 0 if it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


#: properties that the client wants as numbers; all properties of a pipeline are texts
_NUMBERS = (
    "timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms", "cache.capacity", "cache.latest.ttl.sec",
)  # fmt: skip


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise Refused(f"Schema registry setting: {name} cannot be {value!r}.", "Set it to a number.")
    return number


def _unreadable(options: Mapping[str, Any], error: OSError) -> Refused:
    """The error for files of certificates that cannot be read, or have none."""
    files = {name: str(value) for name, value in options.items() if _FILE.fullmatch(name)}
    files = files or {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    # the error of the system names no file
    files = {name: path for name, path in files.items() if not os.access(path, os.R_OK)} or files
    said = ", ".join(f"{name} = {path}" for name, path in files.items())
    return Refused(
        f"Schema registry setting: {said} cannot be used on host {socket.gethostname()}: {error}.",
        "The file has to be in PEM format, on every host that asks the registry (Airflow's workers and the hosts of "
        "the jobs), and readable for their users.",
    )


#: a URL whose user and password, if it has them, can be told from the rest
_URL = re.compile(
    r"(https?://)(?:[^/?#@\s]*@)?((?:\[[\da-f:.]+\]|[^/?#@:\s\[\]]+)(?::\d+)?(?:/[^?#@\s]*)?)", re.IGNORECASE
)

#: the context in the path of a URL
_CONTEXT = re.compile(r"/contexts/:?([^/:,]+)")


def _shown(url: str) -> str:
    """The URL of a registry, or several with commas, for messages: without user and password.

    If a password is not quoted correctly, a part of it would become part of host, port or path, which messages show.
    Such a URL is refused without showing any of it.

    :raises Refused: it is not valid.
    """
    found = [_URL.fullmatch(each.strip()) for each in url.split(",")]
    if not all(found):
        raise Refused(
            "The URL of the schema registry is not valid.",
            "It is http:// or https://, a host, perhaps a port and a path. Give user and password as "
            "basic.auth.user.info (user:password; in Airflow, the connection's login and password), or quote @ : / ? # "
            "% and the comma of a password in the URL as %40 %3A %2F %3F %23 %25 %2C.",
        )
    return ",".join(each[1] + each[2] for each in found if each)


class Registry:
    """Registers schemas and checks their compatibility, over Confluent's API. Nothing that it has answered is
    remembered: each question is asked anew.

    :param config: properties of confluent-kafka's client: ``url``, ``basic.auth.user.info``, ``ssl.…``.
    :param schema_type: what it calls the schemas that are registered; see
        :class:`~airflow_bottledwater.pipeline.formats.Format`.
    :raises Refused: the URL, or a number, is not valid.
    """

    def __init__(self, config: Mapping[str, str], schema_type: str = "AVRO") -> None:
        self.schema_type = schema_type
        options: dict[str, Any] = {"max.retries": "1", "timeout": "10", **config, "url": config["url"].rstrip("/")}
        options |= {name: _number(name, options[name]) for name in _NUMBERS if name in options}
        self.url = _shown(config["url"])
        self._options = options

    @classmethod
    def of(cls, pipeline: Settings) -> Registry | None:
        """That of a pipeline; None if its format needs none."""
        format = pipeline.record_format
        return cls(pipeline.registry, format.schema_type) if format.uses_registry else None

    @property
    def _client(self) -> SchemaRegistryClient:
        """The client, made when it is first used.

        :raises Refused: it does not accept a property, or cannot read a file that one names.
        """
        try:
            return _shared_client(tuple(sorted(self._options.items())))
        except OSError as error:  # also those of ssl
            raise _unreadable(self._options, error) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"Schema registry setting: {error}") from None

    def _ask(
        self, about: str, question: Callable[[SchemaRegistryClient], _Answer], none: frozenset[int] = SCHEMA_NOT_THERE
    ) -> _Answer | None:
        """The registry's answer; None if there is no such subject, version or schema.

        :param about: the subject, for messages.
        :param none: the codes for which it is None.
        :raises StopRequested: the work of this thread is asked to stop while it waits.
        """
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        client = self._client
        # it keeps what it was told for ever, but ids and subjects may be gone, or mean something else, by now
        client.clear_caches()
        for seconds in (*_SLOWER, None):
            try:
                with _ASKING:
                    return question(client)
            except Exception as error:
                if isinstance(error, SchemaRegistryError) and error.error_code in none:
                    return None
                if seconds is None or getattr(error, "http_status_code", 0) != TOO_MANY_REQUESTS:
                    raise translate(error, self.url, about) from error
                pause(seconds)
        raise AssertionError("the last attempt returns or raises")

    def register(self, subject: str, schema: str) -> int:
        """Register a schema, unless the subject has it already; returns its id.

        :raises Outage: the registry does not answer, or takes no schemas now.
        :raises SchemaRefused: it refuses the schema, for example as not compatible with the subject's versions; or
            readers with an earlier version's schema would take values for others.
        :raises Refused: it denies access, or answers with another error.
        """
        schema = self._amended(subject, schema)
        if (known := self.lookup(subject, schema)) is not None:
            return known
        self._check_meaning(subject, schema)
        if (number := self._register(subject, schema)) is None:
            raise Refused(
                f"The schema registry at {self.url} has no place for subjects.",
                "Check the path of the address in the connection (or --schema-registry).",
            )
        return number

    @property
    def _meaning(self) -> Meaning:
        # it imports fastavro, which a DAG processor has no need for
        from airflow_bottledwater.encoding import meaning

        return meaning.OF[self.schema_type]

    def _amended(self, subject: str, schema: str) -> str:
        """The schema with what it has to keep of the subject's latest version, if it is that of a row."""
        amended = self._meaning.amended
        # a key has the columns that it has today: to whoever makes a primary key of it, one more would be NULL
        if amended is None or subject.endswith("-key"):
            return schema
        latest = self._ask(subject, lambda client: client.get_latest_version(subject))
        if latest is None or latest.schema is None or not self._is(subject, latest.subject):
            return schema
        return amended(schema, latest.schema.schema_str or "")

    def _register(self, subject: str, schema: str, number: int | None = None) -> int | None:
        """
        :param number: the id that it is to get; None is returned if the registry does not give it.
        """
        from confluent_kafka.schema_registry import Schema

        class Wanted(Schema):
            """The client has no other way to ask for an id
            (https://docs.confluent.io/platform/current/schema-registry/installation/migrate.html)."""

            def to_dict(self) -> dict[str, Any]:
                return {**super().to_dict(), **({} if number is None else {"id": number})}

        none = SCHEMA_NOT_THERE if number is None else SCHEMA_NOT_THERE | ID_NOT_GIVEN
        return self._ask(
            subject, lambda client: int(client.register_schema(subject, Wanted(schema, self.schema_type))), none
        )

    def restore(self, subject: str, schema: str, number: int) -> int | None:
        """Register a schema that the registry has lost, with the id that it had; returns the id that it has now. None
        if the registry gives ids by itself only (it takes them in its mode IMPORT, or in that of the subject), or has
        given this one to another schema, or another one to this schema.

        :raises BottledWaterError: as :meth:`register`.
        """
        if (known := self.lookup(subject, schema)) is not None:
            return known
        return self._register(subject, schema, number) if self._mode(subject) == "IMPORT" else None

    def gives_back(self, subject: str, schema: str) -> bool:
        """Whether :meth:`restore` would register a schema with the id that it had."""
        return self.lookup(subject, schema) is None and self._mode(subject) == "IMPORT"

    def lookup(self, subject: str, schema: str) -> int | None:
        """The id that a schema has in a subject; None if the subject does not have it, or does not exist.

        :raises Outage: the registry does not answer.
        :raises Refused: it denies access, or answers with another error.
        """
        from confluent_kafka.schema_registry import Schema

        found = self._ask(subject, lambda client: client.lookup_schema(subject, Schema(schema, self.schema_type)))
        if found is None or found.schema_id is None or not self._is(subject, found.subject):
            return None
        return int(found.schema_id)

    @property
    def _context(self) -> str:
        """What the registry writes before the names of this URL's subjects: the context that its path names, if it
        names one."""
        found = _CONTEXT.search(self.url)
        return f":{found[1]}:" if found else ""

    def _is(self, subject: str, answered: str | None) -> bool:
        """Whether an answer is about this subject. A registry that does not find it in this URL's context answers with
        the subject of another one, whose ids mean something else to who asks for them here
        (https://docs.confluent.io/platform/current/schema-registry/schema-linking-cp.html#schema-contexts)."""
        return answered is None or answered.removeprefix(self._context) == subject

    def register_all(self, schemas: Sequence[tuple[str, str]]) -> list[int]:
        """Call :meth:`register` for each (subject, schema), several at a time; returns the ids in this order."""
        with threads(_AT_ONCE, "register") as pool:
            return list(pool.map(lambda each: self.register(*each), schemas))

    def refused(self, schemas: Sequence[tuple[str, str]]) -> list[str]:
        """The reasons why some of these (subject, schema) pairs could not be registered; nothing is registered. A
        subject that does not exist yet accepts any schema.

        :raises Outage: the registry does not answer.
        """
        present = self.subjects()
        # one stands for all that do not exist yet
        new = next((each for each in schemas if each[0] not in present), None)
        asked = [each for each in schemas if each[0] in present] + ([new] if new is not None else [])

        found = self.check_all(asked)
        problems = [str(answer) for answer in found if isinstance(answer, Refused)]
        missing = [subject for (subject, _), answer in zip(asked, found, strict=True) if answer is False]
        return problems + ([closed] if missing and (closed := self._closed(missing[0])) else [])

    def check_all(self, schemas: Sequence[tuple[str, str]]) -> list[bool | Refused]:
        """Call :meth:`check` for each (subject, schema), several at a time; returns what it returns, or why it is
        refused, in this order.

        :raises CredentialsRefused: the registry rejects the password.
        """

        def answer(subject: str, schema: str) -> bool | Refused:
            try:
                return self.check(subject, schema)
            except CredentialsRefused:
                raise
            except Refused as error:
                return error

        with threads(_AT_ONCE, "check") as pool:
            return list(pool.map(lambda each: answer(*each), schemas))

    def _closed(self, subject: str) -> str:
        """Why the registry takes no schema for a subject; empty if it does, or does not say."""
        if (mode := self._mode(subject)) in ("", "READWRITE"):
            return ""
        return (
            f"The schema registry at {self.url} takes no schema for subject {subject!r}: its mode is {mode}. Set the "
            "mode of the registry, or of the subject, to READWRITE."
        )

    def _mode(self, subject: str) -> str:
        """The mode of a subject; empty if it is not told."""
        return self._setting(subject, lambda client: client.get_mode(subject), lambda client: client.get_global_mode())

    def _level(self, subject: str) -> str:
        """The compatibility level of a subject; empty if it is not told."""
        return self._setting(
            subject, lambda client: client.get_compatibility(subject), lambda client: client.get_compatibility()
        )

    def _setting(self, subject: str, own: _Setting, of_all: _Setting) -> str:
        """A setting of a subject: its own, else the registry's. Empty if that is not told: not every registry has each
        setting, and not everybody may see it.

        :raises Outage: the registry does not answer.
        :raises CredentialsRefused: it rejects the password.
        """
        try:
            return self._ask(subject, own) or self._ask("", of_all) or ""
        except CredentialsRefused:
            raise
        except Refused as error:
            log.info("%s", error)
            return ""

    def check(self, subject: str, schema: str) -> bool:
        """Check that the schema could be registered, without registering it; returns whether it is registered already.

        :raises Outage: the registry does not answer.
        :raises SchemaRefused: the schema would be refused.
        :raises Refused: the registry denies access, or answers with another error.
        """
        from confluent_kafka.schema_registry import Schema

        schema = self._amended(subject, schema)
        if self.lookup(subject, schema) is not None:
            return True
        candidate = Schema(schema, self.schema_type)
        for version in self._compared(subject):
            # None: no such subject yet
            if self._ask(subject, lambda client, v=version: client.test_compatibility(subject, candidate, v)) is False:  # type: ignore[misc]
                raise SchemaRefused(
                    f"The schema registry at {self.url} refuses the schema of subject {subject!r}: it says that it is "
                    f"not compatible with version {version}.",
                    "Make the change compatible, relax the subject's compatibility level, or use another topic prefix.",
                )
        self._check_meaning(subject, schema)
        return False

    def _compared(self, subject: str) -> Sequence[int | str]:
        """The versions that the registry compares a schema of a subject with: the latest one, or at the transitive
        levels all."""
        if self._level(subject).endswith("_TRANSITIVE"):
            return self.versions(subject)
        return ("latest",)

    def _check_meaning(self, subject: str, schema: str) -> None:
        """Check that no reader takes values for others: neither with the schema of an earlier version what is written
        with this one, nor with this one what was written before. A registry compares types only; at the level ``NONE``
        nothing is promised to readers. What they take for others with the latest version already, since it was
        registered at that level, is no change of this one.

        :raises SchemaRefused: one would.
        """

        def version(number: int) -> str | None:
            return self._ask(subject, lambda client: client.get_version(subject, number).schema.schema_str)

        numbers = self.versions(subject)
        # one after the other, hundreds of versions would hold the stream up whenever it asks
        with threads(_AT_ONCE, "versions") as pool:
            texts = list(pool.map(version, numbers))
        earlier = [(f"version {number}", text) for number, text in zip(numbers, texts, strict=True) if text]
        self.check_meaning(subject, schema, earlier)

    def check_meaning(self, subject: str, schema: str, earlier: Sequence[tuple[str, str]]) -> None:
        """Check that no reader takes values for others, see :meth:`_check_meaning`.

        :param earlier: earlier schemas of the subject's records, the latest last, each with what it is called in
            messages.
        :raises Outage: the registry does not answer.
        :raises SchemaRefused: one would.
        """
        meaning = self._meaning

        def misread(one: str, other: str) -> dict[str, None]:
            return dict.fromkeys([*meaning.misread(one, other), *meaning.misread(other, one)])

        for name, text in earlier:
            if not (found := misread(schema, text)):
                continue
            known = misread(earlier[-1][1], text)
            new = [each for each in found if each not in known]
            if new and self._level(subject) != "NONE":
                raise SchemaRefused(
                    f"The schema of subject {subject!r} is not registered, although the registry at {self.url} would "
                    f"take it: between it and {name}, readers would read {'; '.join(new)}, without an "
                    "error.",
                    "Before a row is written under the change, undo it; or give the column another name, which makes "
                    "another field of it. Rows that are written already stay as they are. For these, publish the "
                    "column under another name (option rename); or if every reader reads each record with the schema "
                    "that it was written with, set the subject's compatibility level to NONE until one of them is "
                    "published; or start with on_error = isolate, undo the change when the table is set aside, and "
                    "let it go on (bottledwater resume-table). Or use another topic prefix, with a new slot and a "
                    "snapshot.",
                )

    def versions(self, subject: str) -> list[int]:
        """The versions of a subject that are not deleted, the latest last; none if it does not exist.

        :raises Outage: the registry does not answer.
        :raises Refused: it denies access, or answers with another error.
        """
        return sorted(self._ask(subject, lambda client: client.get_versions(subject)) or ())

    def schema(self, number: int) -> str | None:
        """The text of a schema by its id; None if there is none.

        :raises Outage: the registry does not answer.
        :raises Refused: it denies access.
        """
        return self._ask(f"with id {number}", lambda client: str(client.get_schema(number).schema_str))

    def ping(self) -> None:
        """Check that the registry answers, by asking for its subjects.

        :raises Outage: it does not answer.
        :raises Refused: it denies access, or answers with another error.
        """
        self.subjects()

    def subjects(self) -> set[str]:
        """The names of all subjects that are not deleted.

        :raises Outage: it does not answer.
        :raises Refused: it denies access, or answers with another error.
        """
        found = self._ask("", lambda client: client.get_subjects()) or ()
        return {each.removeprefix(self._context) for each in found}
