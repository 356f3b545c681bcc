"""The command line of a job."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.jobs import submit


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spark-submit on the PATH, which is looked for behind the scripts of this Python."""
    found = tmp_path / "spark-of-our-own"
    found.write_text("")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return found


def test_a_local_job_reads_its_settings_where_they_are(binary: Path, tmp_path: Path) -> None:
    made = submit.command("stream", tmp_path / "settings.json", master="local[2]", bounded=True, binary=binary.name)
    assert made[:5] == [str(binary), "--master", "local[2]", "--name", "bottledwater-stream"]
    assert made[-4:] == [str(submit.job_file("stream")), "--pipeline", str(tmp_path / "settings.json"), "--bounded"]
    assert "--files" not in made
    assert "spark.driver.bindAddress=127.0.0.1" in made


def test_the_jvm_of_a_local_job_has_its_temporary_files_in_the_run_directory(binary: Path, tmp_path: Path) -> None:
    """It does not know TMPDIR; and what is there is kept from who cleans by age, and removed with the job."""
    settings, name = tmp_path / "a folder" / "s.json", "spark.driver.extraJavaOptions"
    made = submit.command("stream", settings, master="local[2]", binary=binary.name)
    (given,) = (each for each in made if each.startswith(f"{name}="))
    assert given == f"{name}={submit.LOCAL_CONF[name]} -Djava.io.tmpdir='{settings.parent}'"
    mine = submit.command("stream", settings, master="local[2]", conf={name: "-Xint"}, binary=binary.name)
    assert f"{name}=-Xint" in mine


def test_a_cluster_is_sent_the_settings_and_no_loopback_address(binary: Path, tmp_path: Path) -> None:
    made = submit.command("snapshot", tmp_path / "s.json", master="spark://h:7077", conf={"a": "b"}, binary=binary.name)
    assert made[made.index("--files") + 1] == str(tmp_path / "s.json")
    given = [made[i + 1] for i, word in enumerate(made) if word == "--conf"]
    assert given[0].startswith("spark.executorEnv.GLIBC_TUNABLES=glibc.malloc.arena_max=2:")
    assert given[1:] == ["spark.ui.enabled=false", "spark.cores.max=1", "a=b"]


@pytest.mark.parametrize(
    ("conf", "tasks", "cores"),
    [
        ({}, 1, "1"),
        ({}, 3, "3"),
        ({"spark.cores.max": "8"}, 3, "8"),
        # otherwise Spark would start no executor
        ({"spark.executor.cores": "4"}, 1, "4"),
        ({"spark.executor.cores": "2"}, 3, "4"),
        ({"spark.task.cpus": "2"}, 3, "6"),
        ({"spark.executor.cores": "5", "spark.task.cpus": "2"}, 3, "10"),
    ],
)
def test_a_job_takes_the_cores_of_a_standalone_cluster_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conf: dict[str, str], tasks: int, cores: str
) -> None:
    """All that are free, by Spark's default: the next job would get none. So with what spark-defaults.conf says."""
    monkeypatch.setattr(submit, "driver_address", lambda _: None)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert submit.conf_for("spark://h:7077", conf, tasks=tasks)["spark.cores.max"] == cores
    for between in (" ", "=", " = ", ":\t"):
        lines = [f"{name}{between}{value} " for name, value in conf.items()]
        (tmp_path / "spark-defaults.conf").write_text("\n".join(["# spark.cores.max 9", "", *lines]))
        assert (
            submit.conf_for("spark://h:7077", tasks=tasks).get("spark.cores.max", conf.get("spark.cores.max")) == cores
        )
    for other in ("local[2]", "yarn", "k8s://h"):
        assert "spark.cores.max" not in submit.conf_for(other, tasks=tasks)


@pytest.mark.parametrize("name", ["spark.driver.memory", "spark.executorEnv.GLIBC_TUNABLES"])
def test_the_users_properties_come_last(name: str) -> None:
    assert submit.conf_for("local", {name: "mine"})[name] == "mine"


@pytest.mark.parametrize("master", ["local", "spark://127.0.0.1", "yarn", "k8s://https://127.0.0.1"])
def test_no_driver_needs_a_port_for_its_pages(master: str) -> None:
    """The eighteenth on a host would find none, and end."""
    assert submit.conf_for(master)["spark.ui.enabled"] == "false"
    assert submit.conf_for(master, {"spark.ui.enabled": "true"})["spark.ui.enabled"] == "true"
    if master.startswith(("yarn", "k8s")):
        assert "spark.ui.enabled" not in submit.conf_for(master, cluster=True)


def test_nobody_but_airflow_starts_a_job_in_a_cluster_again() -> None:
    for conf in ({}, {"spark.yarn.maxAppAttempts": "4"}):
        assert submit.conf_for("yarn", conf, cluster=True)["spark.yarn.maxAppAttempts"] == "1"


def test_a_program_that_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no-such-submit is not on the PATH.*spark\]"):
        submit.command("stream", tmp_path, master="local", binary="no-such-submit")


@pytest.mark.parametrize("name", ["snapshot", "stream", "pipeline"])
def test_every_job_has_its_file(name: str) -> None:
    assert f"from airflow_bottledwater.spark.{name} import main" in submit.job_file(name).read_text()


def test_a_job_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match=r"nothing\.py is not installed"):
        submit.job_file("nothing")


def test_driver_and_workers_are_this_python() -> None:
    made = submit.environment({"PATH": "/bin"})
    assert (made["PYSPARK_PYTHON"], made["PYSPARK_DRIVER_PYTHON"]) == (sys.executable, sys.executable)
    assert made["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert submit.environment({"PYSPARK_PYTHON": "/other/python"})["PYSPARK_PYTHON"] == "/other/python"


def test_a_driver_in_the_cluster_has_the_python_of_its_image_or_archive() -> None:
    made = submit.environment({"PATH": "/bin"}, cluster=True)
    assert not {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"} & set(made)
    chosen = {"PYSPARK_PYTHON": "/other/python"}
    assert submit.environment(chosen, cluster=True)["PYSPARK_PYTHON"] == "/other/python"


class Network:
    """Stands in for the module ``socket``: a host with one interface for each family."""

    SOCK_DGRAM = socket.SOCK_DGRAM

    def __init__(self, *unknown: str) -> None:
        self.asked: list[tuple[str, int]] = []
        self._unknown = unknown

    def getaddrinfo(self, host: str, port: int, *, type: int) -> list[Any]:
        self.asked.append((host, port))
        if host in self._unknown:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET6 if ":" in host else socket.AF_INET, type, 17, "", (host, port))]

    def socket(self, family: int, kind: int) -> Any:
        address = "2001:db8::5" if family == socket.AF_INET6 else "10.0.0.5"
        made = SimpleNamespace(connect=lambda target: None, getsockname=lambda: (address, 40000))
        return contextlib.nullcontext(made)


@pytest.mark.parametrize(
    ("master", "asked", "address"),
    [
        ("spark://m:7077", ("m", 7077), "10.0.0.5"),
        # with a standby master
        ("spark://a.example.com:7077,b.example.com:7077", ("a.example.com", 7077), "10.0.0.5"),
        ("spark://[2001:db8::1]:7077", ("2001:db8::1", 7077), "[2001:db8::5]"),
        ("k8s://https://k.example.com:6443", ("k.example.com", 6443), "10.0.0.5"),
        ("k8s://https://k.example.com", ("k.example.com", 443), "10.0.0.5"),
        ("k8s://k.example.com:6443", ("k.example.com", 6443), "10.0.0.5"),
        ("k8s://https://[2001:db8::1]:6443", ("2001:db8::1", 6443), "[2001:db8::5]"),
        # names no host: the route to any other network
        ("yarn", ("192.0.2.1", 9), "10.0.0.5"),
        ("spark://gone:7077", ("gone", 7077), None),
    ],
)
def test_executors_are_told_the_address_towards_the_master(
    monkeypatch: pytest.MonkeyPatch, master: str, asked: tuple[str, int], address: str | None
) -> None:
    network = Network("gone")
    monkeypatch.setattr(submit, "socket", network)
    for name in ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert submit.driver_address(master) == address
    assert network.asked == [asked]
    found = submit.conf_for(master)
    assert found.get("spark.driver.host") == address and "spark.driver.bindAddress" not in found
    # the user knows better, as behind a NAT
    assert submit.conf_for(master, {"spark.driver.host": "nat"})["spark.driver.host"] == "nat"
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.9")
    assert submit.driver_address(master) is None


@pytest.mark.parametrize(
    ("properties", "asked"),
    [
        ({"yarn.resourcemanager.hostname": "rm.example.com"}, ("rm.example.com", 443)),
        ({"yarn.resourcemanager.address": "rm.example.com:8032"}, ("rm.example.com", 8032)),
        ({"yarn.resourcemanager.ha.rm-ids": "a,b", "yarn.resourcemanager.hostname.a": "one"}, ("one", 443)),
        # names nothing, or nothing that is known here
        ({"yarn.resourcemanager.hostname": "${rm.host}"}, ("192.0.2.1", 9)),
        ({}, ("192.0.2.1", 9)),
    ],
)
def test_executors_on_yarn_are_told_the_address_towards_the_resource_manager(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, properties: dict[str, str], asked: tuple[str, int]
) -> None:
    network = Network()
    monkeypatch.setattr(submit, "socket", network)
    for name in ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    lines = "".join(f"<property><name>{n}</name><value>{v}</value></property>" for n, v in properties.items())
    (tmp_path / "yarn-site.xml").write_text(f"<configuration>{lines}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert submit.driver_address("yarn") == "10.0.0.5" and network.asked == [asked]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("spark.authenticate.secret", True),
        ("spark.hadoop.fs.s3a.access.key", True),
        ("spark.ssl.keyPassword", True),
        ("spark.kubernetes.authenticate.submission.oauthToken", True),
        ("spark.kubernetes.authenticate.submission.oauthTokenFile", False),
        ("spark.kubernetes.driver.secrets.settings", False),
        ("spark.kubernetes.driver.secretKeyRef.NAME", False),
        ("spark.kubernetes.executor.secretKeyRef.DB_PASSWORD", False),
        ("spark.authenticate.secret.driver.file", False),
        ("spark.executorEnv.AWS_WEB_IDENTITY_TOKEN_FILE", False),
        ("spark.kafka.clusters.a.sasl.token.mechanism", False),
        ("spark.hadoop.fs.s3a.secret.key", True),
        ("spark.hadoop.fs.s3a.access_key", True),
        ("spark.executorEnv.AWS_SECRET_ACCESS_KEY", True),
        ("spark.executorEnv.aws_access_key_id", True),
        ("spark.kubernetes.driverEnv.DB_PASSWORD_2", True),
        ("spark.hadoop.fs.azure.account.oauth2.client.secret.a.dfs.core.windows.net", True),
    ],
)
def test_a_property_with_a_secret_is_refused(name: str, refused: bool) -> None:
    with pytest.raises(Refused, match=r"spark-defaults\.conf") if refused else contextlib.nullcontext():
        assert submit.conf_for("local[2]", {name: "x"})[name] == "x"
    for none in ("", "false", "True"):
        assert submit.conf_for("local[2]", {name: none})[name] == none


@pytest.mark.parametrize("name", ["spark.driver.extraJavaOptions", "spark.executor.defaultJavaOptions"])
def test_an_option_of_a_jvm_with_a_secret_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=r"spark-defaults\.conf"):
        submit.conf_for("local[2]", {name: "-Xmx1g -Djavax.net.ssl.trustStorePassword=x"})
    submit.conf_for("local[2]", {name: "-Xmx1g -Djava.security.auth.login.config=/etc/secret/jaas.conf"})


def test_a_user_without_a_name_is_refused_before_a_jvm_fails_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    submit.refuse_unknown_user()

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(submit.pwd, "getpwuid", unknown)
    with pytest.raises(Refused, match="no entry in /etc/passwd"):
        submit.command("verify", Path("settings"), master="local[2]")
