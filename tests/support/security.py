"""Servers that ask who is there: TLS with checked names, SCRAM, ACLs and grants, basic authentication; and a pipeline
on them."""

from __future__ import annotations

import base64
import datetime
import functools
import ipaddress
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.local import ports
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.state import store
from tests.support.compare import compare
from tests.support.topics import Flow
from tests.support.waiting import until

#: in every password, and nowhere else
MARKER = b"Ma9ker"
POSTGRES_PASSWORD, KAFKA_PASSWORD, REGISTRY_PASSWORD = "Ma9kerElephant", "Ma9kerBroker", "Ma9kerSchemas"
REGISTRY_USER = "registrar"
_SERVICE = ("_bottledwater_events", "_bottledwater_dead_letters")


# ---------------------------------------------------------------------- certificates


class Authority:
    """A certificate authority of its own, in files."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = folder / f"{name}.pem"
        own = self._signed(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.certificate.write_bytes(own)

    def issue(self, name: str) -> tuple[str, str]:
        """Key and certificate of a server on this machine's loopback address, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ports.HOST))])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private.decode(), self._signed(subject, key, names).decode()

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# ---------------------------------------------------------------------- rights


@dataclass(frozen=True, slots=True)
class Right:
    """One operation on all resources of a kind with a prefix, as docs/operations.md has it.

    :param only_for: empty: always needed.
    :param literal: on the one of this name alone.
    """

    resource: str
    prefix: str
    operation: str
    only_for: str = ""
    literal: bool = False

    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} {self.prefix}*"


def _versions() -> list[str]:
    """Installed PostgreSQL that can do TLS: that of the wheel is built without."""
    return sorted(path.parents[1].name for path in Path("/usr/lib/postgresql").glob("*/bin/postgres"))


class Servers:
    """The three servers.

    Kafka has a second listener for our clients, SASL_SSL; over its own one the test is a superuser.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(_made(folder / "certificates"))
        self.stranger = Authority(folder / "certificates", "stranger")
        self.tls = bool(_versions())
        own = "hostssl" if self.tls else "host"
        self.postgres = PostgresServer(
            folder / "postgres",
            version=_versions()[-1] if self.tls else "16",
            hba=[f"{own} all +pipelines 127.0.0.1/32 scram-sha-256", "host all +pipelines all reject"],
        )
        self.kafka = KafkaBroker(folder / "kafka")
        self._port = ports.free()
        self.registry = SchemaRegistry(folder / "registry", basic_auth=(REGISTRY_USER, REGISTRY_PASSWORD))
        #: the key and certificate that Kafka shows, and the authorities whose clients it trusts where it asks them
        self.shown, self.trusted = (folder / "certificates" / name for name in ("kafka.pem", "trusted.pem"))
        self.certify(self.authority)
        broker, controller = (f"{ports.HOST}:{port}" for port in (self.kafka.port, self.kafka.controller_port))
        self.kafka.settings |= {
            "listeners": f"BROKER://{broker},CLIENTS://{self.bootstrap},CONTROLLER://{controller}",
            "advertised.listeners": f"BROKER://{broker},CLIENTS://{self.bootstrap}",
            "listener.security.protocol.map": "BROKER:PLAINTEXT,CLIENTS:SASL_SSL,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.clients.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "listener.name.clients.ssl.keystore.type": "PEM",
            "listener.name.clients.ssl.keystore.location": str(self.shown),
            "listener.name.clients.ssl.truststore.type": "PEM",
            "listener.name.clients.ssl.truststore.location": str(self.trusted),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }

    def certify(self, authority: Authority) -> None:
        """Let Kafka, from its next start on, show a certificate of this authority and trust only its clients."""
        self.shown.write_text("".join(authority.issue("kafka")))
        self.trusted.write_bytes(authority.certificate.read_bytes())

    @property
    def bootstrap(self) -> str:
        """Kafka's listener for the pipeline."""
        return f"{ports.HOST}:{self._port}"

    @functools.cached_property
    def admin(self) -> AdminClient:
        """Kafka as superuser."""
        return AdminClient({"bootstrap.servers": self.kafka.bootstrap})

    def start(self) -> None:
        """Start all; PostgreSQL gets its certificate into its own folder, whose owner it runs as."""
        self.postgres.start()
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as connection:
            connection.execute("CREATE ROLE pipelines")
            if self.tls:
                owner = self.postgres.data.stat()
                for name, text in zip(("server.key", "server.crt"), self.authority.issue("postgres"), strict=True):
                    file = self.postgres.data / name
                    file.touch(mode=0o600)
                    file.write_text(text)
                    os.chown(file, owner.st_uid, owner.st_gid)
                connection.execute("ALTER SYSTEM SET ssl = on")
                connection.execute("SELECT pg_reload_conf()")
        self.kafka.start()
        self.registry.start()

    def stop(self) -> None:
        """Stop all."""
        for server in (self.registry, self.kafka, self.postgres):
            server.stop()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def documented_rights() -> list[Right]:
    """The table of docs/operations.md: what it lists is what the pipelines of the tests get."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    section = page.partition("\n## ACLs in Kafka\n")[2].partition("\n## ")[0]
    rights = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "`" in cells[1]:
            prefix = cells[1].removeprefix("prefix ").strip("`")
            rights += [Right(cells[0], prefix, each.strip(), cells[3].strip("`")) for each in cells[2].split(",")]
    return rights


def secrets_in(text: bytes | str) -> list[bytes]:
    """What of the passwords is in it, plain or as basic authentication has them."""
    data = text.encode() if isinstance(text, str) else text
    encoded = base64.b64encode(f"{REGISTRY_USER}:{REGISTRY_PASSWORD}".encode())
    return [secret for secret in (MARKER, encoded) if secret in data]


class Secured(Flow):
    """A pipeline whose Kafka user and role are its own and may do what was granted; the test itself is superuser.

    :param rights: Kafka's.
    """

    def __init__(self, servers: Servers, rights: Iterable[Right], **settings: Any) -> None:
        database = f"d{uuid.uuid4().hex[:8]}"
        super().__init__(servers.postgres.createdb(database), servers.kafka, servers.registry, **settings)
        self.servers = servers
        self.user = f"user_{uuid.uuid4().hex[:8]}"
        self.kafka_password(KAFKA_PASSWORD)
        self.grant(*rights)
        self.change(
            postgres=self.role(password=POSTGRES_PASSWORD),
            kafka={
                "bootstrap.servers": servers.bootstrap,
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": self.user,
                "sasl.password": KAFKA_PASSWORD,
                "ssl.ca.location": str(servers.authority.certificate),
            },
            registry={"url": servers.registry.url, "basic.auth.user.info": f"{REGISTRY_USER}:{REGISTRY_PASSWORD}"},
        )
        # what everybody may by default, nobody may here
        self.execute(
            f"REVOKE ALL ON DATABASE {database} FROM PUBLIC",
            "REVOKE ALL ON SCHEMA public FROM PUBLIC",
            f"CREATE ROLE {self.user} LOGIN REPLICATION PASSWORD '{POSTGRES_PASSWORD}' IN ROLE pipelines",
            f"GRANT CONNECT ON DATABASE {database} TO {self.user}",
            "CREATE SCHEMA sales",
            "CREATE TABLE sales.a (id int PRIMARY KEY, t text)",
            "INSERT INTO sales.a SELECT g, 'x' FROM generate_series(1, 100) g",
            f"GRANT USAGE ON SCHEMA sales TO {self.user}",
            f"GRANT SELECT ON sales.a TO {self.user}",
        )

    def role(self, **more: str) -> str:
        """The pipeline's connection string."""
        tls = {"sslmode": "verify-full", "sslrootcert": str(self.servers.authority.certificate)}
        return make_conninfo(self.dsn, user=self.user, **(tls if self.servers.tls else {}), **more)

    def let_publish(self) -> None:
        """Let the role make publications, as docs/operations.md says."""
        self.execute(
            f"CREATE ROLE {self.user}_owner",
            f"GRANT CREATE ON SCHEMA sales TO {self.user}_owner",
            f"ALTER TABLE sales.a OWNER TO {self.user}_owner",
            f"GRANT {self.user}_owner TO {self.user}",
            f"GRANT CREATE ON DATABASE {conninfo_to_dict(self.dsn)['dbname']} TO {self.user}",
        )

    def publish(self) -> None:
        """Make the publications, as a DBA does."""
        name = self.pipeline.publication_name
        self.execute(
            f"CREATE PUBLICATION {name} FOR TABLE sales.a",
            f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
        )

    def make_topics(self) -> None:
        """Make the topics, as an administrator does."""
        compacted = {"cleanup.policy": "compact"}
        kinds = {name: {} if "_bottledwater_" in name else compacted for name in self.topics}
        asked = [NewTopic(name, 1, 1, config=config) for name, config in kinds.items()]
        for name, future in self.servers.admin.create_topics(asked).items():
            try:
                future.result(60)
            except KafkaException:
                assert name == store.CONTROL_TOPIC  # another test made it

    @property
    def topics(self) -> list[str]:
        """All topics of the pipeline."""
        facts = store.state_topic_name(str(conninfo_to_dict(self.dsn)["dbname"]), self.pipeline.slot)
        own = [f"{self.pipeline.topic_prefix}.{name}" for name in ("sales.a", *_SERVICE)]
        return [*own, facts, store.CONTROL_TOPIC]

    def narrow_rights(self) -> list[Right]:
        """What keeps this pipeline apart from all others."""
        cluster = self.execute("SELECT system_identifier FROM pg_control_system()")[0][0]
        database, slot = conninfo_to_dict(self.dsn)["dbname"], self.pipeline.slot
        memory = ("_bottledwater", f"_bottledwater.{database}.{slot}")
        return [
            Right("Topic", "shop.", "Write"),
            *(Right("Topic", name, operation, literal=True) for name in memory for operation in ("Read", "Write")),
            Right("Transactional id", f"bottledwater-{cluster}-{database}-{slot}-", "Write"),
        ]

    def differences(self) -> list[str]:
        """What the topic and the table differ in, seen by the superuser."""
        servers = {"bootstrap.servers": self.kafka.bootstrap}
        topic = f"{self.pipeline.topic_prefix}.sales.a"
        return compare(self.dsn, servers, self.pipeline.registry, "sales.a", topic).differences

    def kafka_password(self, password: str) -> None:
        """Make the user, or give it another password; returns when the broker takes it."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(self.user, info, password.encode())
        self.servers.admin.alter_user_scram_credentials([wanted])[self.user].result(60)

    def grant(self, *rights: Right) -> None:
        """Let the user do this."""
        if rights:
            for future in self.servers.admin.create_acls([self._acl(r) for r in rights]).values():
                future.result(60)
        self._settle(rights, granted=True)

    def revoke(self, *rights: Right) -> None:
        """And no longer."""
        for future in self.servers.admin.delete_acls([self._filter(r) for r in rights]).values():
            future.result(60)
        self._settle(rights, granted=False)

    def _settle(self, rights: Iterable[Right], *, granted: bool) -> None:
        """The broker's authorizer follows the controller."""
        for right in rights:
            filtered = self._filter(right)
            until(
                lambda filtered=filtered: bool(self.servers.admin.describe_acls(filtered).result(60)) is granted,
                f"the broker knows of {right}",
            )

    def _acl(self, right: Right) -> AclBinding:
        return AclBinding(*self._terms(right))

    def _filter(self, right: Right) -> AclBindingFilter:
        return AclBindingFilter(*self._terms(right))

    def _terms(self, right: Right) -> tuple[Any, ...]:
        words = {"Transactional id": "TRANSACTIONAL_ID", "DescribeConfigs": "DESCRIBE_CONFIGS"}
        return (
            ResourceType[words.get(right.resource, right.resource.upper())],
            right.prefix.replace("shop.", f"{self.pipeline.topic_prefix}."),
            ResourcePatternType.LITERAL if right.literal else ResourcePatternType.PREFIXED,
            f"User:{self.user}",
            "*",
            AclOperation[words.get(right.operation, right.operation.upper())],
            AclPermissionType.ALLOW,
        )
