"""A Kafka broker: one node that is both broker and controller (KRaft), without ZooKeeper."""

from __future__ import annotations

import base64
import hashlib
import logging
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess, run

_log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.probe")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "BROKER",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    # one node: nothing can be replicated
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    # the first consumer of a group need not wait for others
    "group.initial.rebalance.delay.ms": "0",
    # after kill -9, the controller waits until the old session has expired: 12 s by default, 4 s with these
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "500",
    # an idle controller writes nothing: two records a second, which all parts of the broker apply, are a fifth of what
    # it does while nobody asks
    "metadata.max.idle.interval.ms": "0",
    # the default would take half of the heap
    "log.cleaner.dedupe.buffer.size": "16777216",
}
_QUICK = ["-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
#: KAFKA_JVM_PERFORMANCE_OPTS of bin/kafka-run-class.sh
_PRODUCTION = ["-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"]


class KafkaBroker(ServerProcess):
    """A broker in `folder`.

    :param port: 0 picks a free one, which the folder keeps.
    :param settings: further lines of server.properties; they override the defaults here.
    :param fast_start: whether the JVM compiles little and shares class data, for tests. If not, it runs as in
        production, for measuring throughput (then also use `java_heap="1g"`, as bin/kafka-server-start.sh does).
    """

    name = "kafka"

    def __init__(
        self,
        folder: Path | str,
        *,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        java_heap: str = "256m",
        fast_start: bool = True,
        cache: Path | None = None,
        die_with_parent: bool = True,
    ) -> None:
        super().__init__(folder, die_with_parent=die_with_parent)
        kept = ports.keep(self.folder, broker=port, controller=0)
        self.port, self.controller_port = kept["broker"], kept["controller"]
        self.settings = dict(settings or {})
        self.java_heap = java_heap
        self.fast_start = fast_start
        self.cache = cache or artifacts.cache_folder()
        self._java_options: list[str] = []

    @property
    def bootstrap(self) -> str:
        """The clients' `bootstrap.servers`."""
        return f"{ports.HOST}:{self.port}"

    def prepare(self) -> None:
        ports.check(self.port)
        ports.check(self.controller_port)
        self._java_options = [f"-Xmx{self.java_heap}", *self._jvm()]
        listener, controller = f"{ports.HOST}:{self.port}", f"{ports.HOST}:{self.controller_port}"
        properties = {
            **_SETTINGS,
            "listeners": f"BROKER://{listener},CONTROLLER://{controller}",
            "advertised.listeners": f"BROKER://{listener}",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(self.folder / "data"),
            **self.settings,
        }
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        if not (self.folder / "data" / "meta.properties").exists():
            self._format()

    def _jvm(self) -> list[str]:
        if not self.fast_start:
            return [f"-Xms{self.java_heap}", *_PRODUCTION]
        archive = _class_data(self.cache)
        # -Xshare:auto: an archive that does not match is ignored
        shared = [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:cds=off"] if archive else []
        return [*_QUICK, *shared]

    def command(self) -> list[str]:
        return [*_java(self.cache), *self._java_options, "kafka.Kafka", str(self._properties)]

    def ready(self) -> bool:
        try:
            # checked first, since a client that cannot connect would wait before it tries again
            socket.create_connection((ports.HOST, self.port), timeout=1).close()
            client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}, logger=_quiet)
            return bool(client.list_topics(timeout=2).brokers)
        except (OSError, KafkaException):
            return False

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _format(self) -> None:
        command = [*_java(self.cache), *self._java_options, "kafka.tools.StorageTool", "format"]
        command += [
            f"--cluster-id={_kafka_uuid()}",  # with "=": the id may begin with a dash
            "-c",
            str(self._properties),
            "--ignore-formatted",
        ]
        run(command, "formatting Kafka's storage", cwd=self.folder)


def _java(cache: Path) -> list[str]:
    jars = ":".join(map(str, artifacts.kafka_jars(cache)))
    return [str(artifacts.system_java()), "-Dorg.apache.logging.log4j.level=WARN", "-cp", jars]


def _kafka_uuid() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def _class_data(cache: Path) -> Path | None:
    """The archive of the broker's loaded classes (CDS), which halves the time to start; it is written once by a broker
    that is started for this purpose. None if it cannot be made, since it only saves time."""
    java = artifacts.system_java()
    release = java.parents[1] / "release"
    tied_to = [str(java), release.read_text() if release.exists() else "", *_java(cache)]
    key = hashlib.sha256("\n".join(tied_to).encode()).hexdigest()[:12]
    archive = cache / f"kafka-classes-{key}.jsa"
    failed = archive.with_suffix(".failed")
    if archive.exists():
        return archive
    with artifacts.lock(cache, archive.name):
        if archive.exists() or failed.exists():
            return archive if archive.exists() else None
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
        try:
            fresh = folder / "classes.jsa"
            trainer = _Trainer(folder / "broker", cache=cache)
            trainer.archive = fresh
            trainer.start()
            trainer.stop()
            fresh.rename(archive)
        except (LocalServerError, OSError) as error:
            _log.warning("Kafka will start slowly, its classes cannot be archived: %s", error)
            failed.touch()
            return None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return archive


class _Trainer(KafkaBroker):
    """A broker that writes the archive of classes when it ends."""

    archive: Path

    def prepare(self) -> None:
        super().prepare()
        # after the storage is formatted, which would write an archive, too
        self._java_options += [f"-XX:ArchiveClassesAtExit={self.archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]

    def _jvm(self) -> list[str]:
        return _QUICK
