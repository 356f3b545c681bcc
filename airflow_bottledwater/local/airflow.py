"""An Airflow as it is deployed: API server, scheduler, triggerer and DAG processor, each a process, with
LocalExecutor."""

from __future__ import annotations

import base64
import datetime
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import ports
from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.process import ServerProcess, plain_environment, run

USER = "admin"
_SPARK = {"conn_type": "spark", "host": "local[2]", "extra": {"spark-binary": "spark-submit", "deploy-mode": "client"}}
_SETTINGS = {
    "CORE__LOAD_EXAMPLES": "False",
    "CORE__EXECUTOR": "LocalExecutor",
    "CORE__PARALLELISM": "8",
    "CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
    "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
    "API__HOST": ports.HOST,
    "API__WORKERS": "1",
    "SCHEDULER__ENABLE_HEALTH_CHECK": "False",
    "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
    "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
    "TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    # each time, every file is imported in a process of its own
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
    "DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "USAGE_DATA_COLLECTION__ENABLED": "False",
}


class Component(ServerProcess):
    """One of the processes.

    :param health: by which name the API server knows of its heartbeats; without one, it is the API server.
    :param folder: by default the stack's own.
    """

    start_timeout = 180.0
    # In half of all cases, the triggerer sleeps 10 s after its child has ended. If it is killed before that, Airflow
    # considers it alive for another 30 s, during which its triggers are not given to another one.
    stop_grace = 13.0
    # the scheduler would wait for running tasks
    children_grace = 3.0

    def __init__(
        self, stack: AirflowStack, name: str, *arguments: str, health: str = "", folder: Path | None = None
    ) -> None:
        super().__init__(folder or stack.folder, die_with_parent=stack.die_with_parent)
        self.name = name
        self._stack = stack
        self._arguments = arguments
        self._health = health
        self._since = datetime.datetime.now(datetime.UTC)

    def prepare(self) -> None:
        self._since = datetime.datetime.now(datetime.UTC)
        if not self._health:
            ports.check(self._stack.port)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "airflow", self.name, *self._arguments]

    def environment(self) -> Mapping[str, str]:
        return self._stack.environment()

    def stop(self, grace: float | None = None) -> None:
        """Stop it within ``grace`` seconds."""
        self._stop(self.stop_signal, grace)

    def ready(self) -> bool:
        """Whether the API server answers, and has a heartbeat of this component since it was started."""
        try:
            with ports.open_url(f"{self._stack.url}/api/v2/monitor/health") as answer:
                health = json.load(answer)
        except (OSError, ValueError):
            return False
        if not self._health:
            return True
        beat = (health.get(self._health) or {}).get(f"latest_{self._health}_heartbeat")
        return beat is not None and datetime.datetime.fromisoformat(beat) > self._since


class AirflowStack:
    """An Airflow in `folder` (its `AIRFLOW_HOME`).

    :param dags_folder: where the DAG files are.
    :param metadata_dsn: SQLAlchemy URL of an existing, empty database: `PostgresServer.url("airflow")`.
    :param env: further environment variables for all components, for example `AIRFLOW_CONN_…`; they override the ones
        here. Of this process's environment, Airflow gets only the few variables that it needs, so that no secrets get
        into its tasks and logs.
    :param die_with_parent: whether it ends when the process that started it ends.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        dags_folder: Path | str,
        metadata_dsn: str,
        env: Mapping[str, str] | None = None,
        die_with_parent: bool = True,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.dags_folder = Path(dags_folder).absolute()
        self.metadata_dsn = metadata_dsn
        self.env = dict(env or {})
        self.die_with_parent = die_with_parent
        kept = ports.keep(self.folder, api=0, worker_logs=0, trigger_logs=0)
        self.port = kept["api"]
        self._log_ports = kept["worker_logs"], kept["trigger_logs"]
        # Logs are read from files here; Airflow's log servers would listen on all addresses of the machine.
        self.components: dict[str, Component] = {
            "api-server": Component(self, "api-server"),
            "scheduler": Component(self, "scheduler", "--skip-serve-logs", health="scheduler"),
            "triggerer": Component(self, "triggerer", "--skip-serve-logs", health="triggerer"),
            "dag-processor": Component(self, "dag-processor", health="dag_processor"),
        }

    @property
    def url(self) -> str:
        """The URL of the UI, which is also the root of the API."""
        return f"http://{ports.HOST}:{self.port}"

    @property
    def user(self) -> str:
        return USER

    @property
    def password(self) -> str:
        """The generated password of the user `admin`, also in `passwords.json` of the folder."""
        return str(self._secrets()["password"])

    def client(self) -> AirflowClient:
        """A client of the REST API, logged in as the user."""
        return AirflowClient(self.url, self.user, self.password)

    def environment(self) -> dict[str, str]:
        """The whole environment of each component, and so of each task."""
        own = self._secrets()
        worker_logs, trigger_logs = self._log_ports
        settings = _SETTINGS | {
            "CORE__DAGS_FOLDER": str(self.dags_folder),
            "CORE__FERNET_KEY": own["fernet_key"],
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.folder / "passwords.json"),
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            # both are set: for asynchronous connections, Airflow would use another driver
            "DATABASE__SQL_ALCHEMY_CONN": self.metadata_dsn,
            "DATABASE__SQL_ALCHEMY_CONN_ASYNC": self.metadata_dsn,
            "API__PORT": str(self.port),
            "API__BASE_URL": self.url,
            "API__SECRET_KEY": own["secret_key"],
            "API_AUTH__JWT_SECRET": own["jwt_secret"],
            "LOGGING__WORKER_LOG_SERVER_PORT": str(worker_logs),
            "LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_logs),
        }
        programs = str(Path(sys.executable).parent)
        python = {
            # the Spark provider accepts only the names of programs, and Spark takes python3 from the PATH
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": ports.HOST,
            # the standard input of a task is a socket, in which case a first-level bash reads ~/.bashrc, which may
            # change the PATH
            "SHLVL": "1",
        }
        return (
            plain_environment(
                AIRFLOW_HOME=str(self.folder),
                XDG_RUNTIME_DIR=str(self.folder / "run"),
                NO_PROXY=f"{ports.HOST},localhost",
                AIRFLOW_CONN_SPARK_DEFAULT=json.dumps(_SPARK),
                **python,
                **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            )
            | self.env
        )

    def start(self) -> Self:
        """Migrate the database, and start all components at the same time."""
        if not all(component.running for component in self.components.values()):
            (self.folder / "run").mkdir(parents=True, exist_ok=True)
            (self.folder / "run").chmod(0o700)
            self._secrets()
            migrate = [sys.executable, "-m", "airflow", "db", "migrate"]
            run(migrate, "airflow db migrate", cwd=self.folder, env=self.environment())
            try:
                self._all(lambda component: component.start())
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Send SIGTERM to all components at the same time, and after 5 s SIGKILL to those left of their families of
        processes.

        SIGTERM is not sent to whole families, since that can stall the triggerer.
        """
        self._all(lambda component: component.stop(grace=5))

    def restart(self, name: str) -> None:
        """Stop and start one component."""
        if name not in self.components:
            raise LocalServerError(f"Airflow has no {name!r} here, but {', '.join(self.components)}")
        self.components[name].restart()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _all(self, act: Callable[[Component], object]) -> None:
        with ThreadPoolExecutor(max_workers=len(self.components)) as threads:
            done = [threads.submit(act, component) for component in self.components.values()]
        for future in done:
            future.result()

    def _secrets(self) -> dict[str, Any]:
        """Airflow's own secrets, generated once and kept in a file that only this user can read."""
        file = self.folder / "secrets.json"
        if not file.exists():
            made = {
                "fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
                "secret_key": secrets.token_hex(32),
                "jwt_secret": secrets.token_hex(48),
                "password": secrets.token_urlsafe(18),
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_private(self.folder / "passwords.json", {USER: made["password"]})
            _write_private(file, made)
        content: dict[str, Any] = json.loads(file.read_text())
        return content


def _write_private(file: Path, content: object) -> None:
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(json.dumps(content))
