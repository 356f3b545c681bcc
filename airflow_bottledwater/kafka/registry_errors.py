"""What a schema registry's error codes mean: which of them say something of a schema, and which of the registry."""

from __future__ import annotations

import re

from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, Refused, SchemaRefused

# The codes: https://docs.confluent.io/platform/current/schema-registry/develop/api.html#errors, and
# io.confluent.kafka.schemaregistry.rest.exceptions.Errors. Apicurio, Karapace and Redpanda use the same.
#: no such subject, version or schema; a subject or a version that was soft-deleted; no compatibility level, or no mode,
#: of its own
SCHEMA_NOT_THERE = frozenset({40401, 40402, 40403, 40404, 40406, 40408, 40409})
#: the status of a schema that is not compatible with the subject's versions, and the code of some registries
_INCOMPATIBLE = 409
#: of 422: a schema that is not valid, or too large. All others are about the subject, a version, a level, a mode.
_OF_THE_SCHEMA = frozenset({42201, 42209})
#: OPERATION_NOT_PERMITTED: the registry, or the subject, is in a mode in which it takes no schemas (READONLY, IMPORT)
NOT_PERMITTED = 42205
#: answers to a schema that asks for an id: another one has it, or the subject is not in the mode IMPORT any more
#: (NOT_PERMITTED), or the schema has another id already (ID_DOES_NOT_MATCH)
ID_NOT_GIVEN = frozenset({NOT_PERMITTED, 42207})
#: alerts of a server that does not accept the client's certificate, or that gets none (RFC 8446, 6.2), as Python's ssl
#: has them
_ALERT = re.compile("ALERT_((BAD_|UNSUPPORTED_)?CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE)")
#: the status of a request beyond the number that the registry takes in a second
TOO_MANY_REQUESTS = 429


def translate(error: Exception, url: str, subject: str) -> BottledWaterError:
    """The error of this package for one that the registry's client raises. Only what the registry says of a schema is a
    :class:`SchemaRefused`, which can be a row's fault.

    :param url: the registry's, without a password.
    :param subject: what was asked about.
    """
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    where, about = f"The schema registry at {url}", f" (asked about {subject!r})" if subject else ""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return CredentialsRefused(
            f"The certificate of the schema registry at {url} is not accepted: {str(error)[:200]}.",
            "If an authority of your own has signed it, set ssl.ca.location, a property of the registry's client, to "
            "the file with that authority's certificate. Otherwise check the host's name and the certificate.",
        )
    if _ALERT.search(str(error)):
        return CredentialsRefused(
            f"{where} does not accept the client's certificate: {str(error)[:200]}.",
            "Check ssl.certificate.location and ssl.key.location, properties of the registry's client, and until when "
            "the certificate is valid.",
        )
    if not isinstance(error, SchemaRegistryError):
        return _away(where, f"{type(error).__name__}: {str(error)[:200]}")
    status, code, text = error.http_status_code, error.error_code, str(error.error_message)[:300]
    if status == _INCOMPATIBLE or code in _OF_THE_SCHEMA:
        return SchemaRefused(
            f"{where} refuses the schema of subject {subject!r}: {text}.",
            "Make the change compatible, relax the subject's compatibility level, or use another topic prefix.",
        )
    if code == NOT_PERMITTED:
        return Outage(
            f"{where} takes no schema for subject {subject!r} now: {text}.",
            f"Set the mode of the registry, or of the subject, back to READWRITE (it is shown at {url}/mode); no row "
            "has a fault.",
        )
    if status == 401:
        return CredentialsRefused(f"{where} denies access.", "Check user and password.")
    if status == 403:
        return Refused(
            f"{where} denies access{about}: {text}.",
            "Grant the user what docs/operations.md lists, or raise the limit that the registry names.",
        )
    if status == TOO_MANY_REQUESTS:
        return Outage(
            f"{where} gets more requests than it takes: {text}.",
            "Start fewer pipelines at the same time, or raise the limit of the registry.",
        )
    if status >= 500:
        return _away(where, f"{text} (HTTP {status}, code {code})")
    return Refused(
        f"{where} answers{about}: {text} (HTTP {status}, code {code}).",
        "Check its address in the connection (or --schema-registry), with its path, and its settings; no row has a "
        "fault.",
    )


def _away(where: str, what: str) -> Outage:
    return Outage(
        f"{where} does not answer: {what}.",
        "Check the address in the connection (or --schema-registry) and the registry.",
    )
