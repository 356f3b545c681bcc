"""The daemons of a YARN cluster: the ordinary ResourceManager and NodeManager, of the version whose client pyspark
has."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess, plain_environment
from tests.support.clusters.hosts import Host, Network

VERSION = "3.5.0"
_ARTIFACTS = (
    # has the daemons, too, and is made for a class path without anything else
    ("org.apache.hadoop", "hadoop-client-minicluster", VERSION),
    ("org.bouncycastle", "bcpkix-jdk18on", "1.82"),
    # without a binding, they would log nothing
    ("org.slf4j", "slf4j-reload4j", "1.7.36"),
)
_LOG4J = """\
log4j.rootLogger=INFO, console
log4j.logger.http.requests=WARN
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n
"""
_SCHEDULER = {
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": "100",
    # by default, a tenth of a cluster may be drivers, which is less than one on a small cluster
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
}
_SETTINGS = {
    "yarn.scheduler.minimum-allocation-mb": "128",
    "yarn.nodemanager.resource.memory-mb": "2048",
    "yarn.nodemanager.resource.cpu-vcores": "2",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.pmem-check-enabled": "false",
    # a disk of a developer's machine is often fuller than the 90 % of which a node is taken for ill
    "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
    # 10 minutes by default, for which a lost node is believed in
    "yarn.nm.liveness-monitor.expiry-interval-ms": "20000",
    # 10 minutes by default; it includes the time in which a driver's archives are unpacked and its Spark starts
    "yarn.am.liveness-monitor.expiry-interval-ms": "120000",
}


def hadoop_jars(cache: Path) -> Path:
    """The folder of the daemons' class path."""

    def fill(folder: Path) -> None:
        dependencies = "".join(
            f'<dependency org="{organisation}" name="{name}" rev="{revision}" conf="default"/>'
            for organisation, name, revision in _ARTIFACTS
        )
        artifacts.retrieve(dependencies, folder, types=("jar", "bundle"))
        if missing := [name for _, name, _ in _ARTIFACTS if not list(folder.glob(f"{name}-*.jar"))]:
            raise LocalServerError(f"not retrieved: {', '.join(missing)}")

    return artifacts.once(cache / f"hadoop-{VERSION}", fill)


def write_configuration(file: Path, settings: Mapping[str, str]) -> None:
    """Write settings as Hadoop reads them."""
    lines = (f"<property><name>{n}</name><value>{escape(v)}</value></property>\n" for n, v in settings.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")


class _Daemon(ServerProcess):
    """One of the two kinds."""

    main = ""
    start_timeout = 120.0

    def settings(self) -> dict[str, str]:
        """Of yarn-site.xml."""
        raise NotImplementedError

    def prepare(self) -> None:
        write_configuration(self.folder / "conf" / "yarn-site.xml", self.settings())
        write_configuration(self.folder / "conf" / "capacity-scheduler.xml", _SCHEDULER)
        write_configuration(self.folder / "conf" / "core-site.xml", {"hadoop.tmp.dir": str(self.folder / "tmp")})
        (self.folder / "conf" / "log4j.properties").write_text(_LOG4J)
        (self.folder / "tmp").mkdir(exist_ok=True)

    def java(self) -> list[str]:
        """The command, if no host or names are to be considered."""
        jars = hadoop_jars(artifacts.cache_folder())
        options = ["-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={self.folder}/tmp"]
        main = f"org.apache.hadoop.yarn.server.{self.main}"
        return [str(artifacts.system_java()), *options, "-cp", f"{self.folder}/conf:{jars}/*", main]

    def environment(self) -> Mapping[str, str]:
        # containers inherit it; what they run finds its Java by it
        return plain_environment(JAVA_HOME=str(artifacts.system_java().parents[1]))


class ResourceManager(_Daemon):
    """The resource manager, on this machine.

    :param network: of the nodes, if they are on other hosts.
    :param settings: further ones of yarn-site.xml.
    """

    name = "resourcemanager"
    main = "resourcemanager.ResourceManager"

    def __init__(self, folder: Path, network: Network | None = None, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self.network = network
        self.address = network.address if network else ports.HOST
        wanted = {"client": 0, "scheduler": 0, "tracker": 0, "admin": 0, "web": 0}
        self._ports = ports.keep(self.folder, **wanted)
        self._more = dict(settings or {})

    @property
    def url(self) -> str:
        """The root of the REST API."""
        return f"http://{self.address}:{self._ports['web']}/ws/v1/cluster"

    def where(self) -> dict[str, str]:
        """The settings by which clients and nodes find it."""
        keys = {"address": "client", "scheduler.address": "scheduler", "resource-tracker.address": "tracker"}
        keys |= {"admin.address": "admin", "webapp.address": "web"}
        found = {f"yarn.resourcemanager.{key}": f"{self.address}:{self._ports[name]}" for key, name in keys.items()}
        return {"yarn.resourcemanager.hostname": self.address, **found}

    def settings(self) -> dict[str, str]:
        own = {"yarn.node-attribute.fs-store.root-dir": f"file://{self.folder}/node-attributes"}
        return {**_SETTINGS, **self.where(), **own, **self._more}

    def command(self) -> list[str]:
        # it looks up the names of the nodes
        return self.network.command(self.java()) if self.network else self.java()

    def ask(self, path: str, method: str = "GET", body: object = None) -> Any:
        """A request to the REST API, and the content of the answer; the path begins with a slash."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        with ports.open_url(urllib.request.Request(self.url + path, data, headers, method=method)) as answer:
            return json.load(answer)

    def ready(self) -> bool:
        try:
            return bool(self.ask("/info")["clusterInfo"]["state"] == "STARTED")
        except (OSError, ValueError):
            return False


class NodeManager(_Daemon):
    """A node manager.

    :param host: where it runs; by default on this machine.
    """

    name = "nodemanager"
    main = "nodemanager.NodeManager"

    def __init__(
        self,
        folder: Path,
        manager: ResourceManager,
        host: Host | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        self.host, self.manager = host, manager
        # what it calls itself in the cluster is a name, whatever it is told
        self.address = host.name if host else "localhost"
        self._ports = ports.keep(self.folder, node=0, localizer=0, web=0, collector=0)
        self._more = dict(settings or {})

    @property
    def node(self) -> str:
        """Its id in the cluster."""
        return f"{self.address}:{self._ports['node']}"

    def settings(self) -> dict[str, str]:
        own = {
            "hostname": self.address,
            "address": self.node,
            "localizer.address": f"{self.address}:{self._ports['localizer']}",
            "webapp.address": f"{self.address}:{self._ports['web']}",
            "collector-service.address": f"{self.address}:{self._ports['collector']}",
            "local-dirs": str(self.folder / "local"),
            "log-dirs": str(self.folder / "logs"),
        }
        named = {f"yarn.nodemanager.{name}": value for name, value in own.items()}
        return {**_SETTINGS, **self.manager.where(), **named, **self._more}

    def command(self) -> list[str]:
        return self.host.command(self.java()) if self.host else self.java()

    def state(self) -> str:
        """What the resource manager thinks of it: RUNNING, LOST and others; empty if it does not know it."""
        nodes = (self.manager.ask("/nodes")["nodes"] or {}).get("node", [])
        return next((str(node["state"]) for node in nodes if node["id"] == self.node), "")

    def ready(self) -> bool:
        try:
            # of one that was started again it may still be known that it ran
            text = self.log_path.read_bytes()[self._log_start :]
            return b"Registered with ResourceManager" in text and self.state() == "RUNNING"
        except (OSError, ValueError):
            return False
