"""A schema registry with Confluent's API: Apicurio Registry, with its database in a file."""

from __future__ import annotations

import base64
import urllib.request
from pathlib import Path

from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess


class SchemaRegistry(ServerProcess):
    """A registry in `folder`.

    :param port: 0 picks a free one, which the folder keeps.
    :param basic_auth: user and password that every request must have.
    """

    name = "registry"

    def __init__(
        self,
        folder: Path | str,
        *,
        port: int = 0,
        basic_auth: tuple[str, str] | None = None,
        die_with_parent: bool = True,
    ) -> None:
        super().__init__(folder, die_with_parent=die_with_parent)
        kept = ports.keep(self.folder, registry=port, management=0)
        self.port, self.management_port = kept["registry"], kept["management"]
        self.basic_auth = basic_auth
        self._cache = artifacts.cache_folder()

    @property
    def url(self) -> str:
        """The clients' `url` or `schema.registry.url`; its path is needed, too."""
        return f"http://{ports.HOST}:{self.port}/apis/ccompat/v7"

    def prepare(self) -> None:
        ports.check(self.port)
        ports.check(self.management_port)
        settings = {
            "quarkus.http.host": ports.HOST,
            "quarkus.http.port": str(self.port),
            # otherwise it would also listen on port 9000 of every address
            "quarkus.management.host": ports.HOST,
            "quarkus.management.port": str(self.management_port),
            "apicurio.storage.kind": "sql",
            "apicurio.storage.sql.kind": "h2",
            # by default, H2 writes a commit half a second later: schemas registered just before kill -9 would be lost
            "apicurio.datasource.url": f"jdbc:h2:file:{self.folder / 'data' / 'registry'};WRITE_DELAY=0",
            # Confluent's default
            "apicurio.rules.global.compatibility": "BACKWARD",
            # otherwise a schema that is only formatted differently would get another id
            "apicurio.ccompat.use-canonical-hash": "true",
            "quarkus.log.level": "WARN",
            "quarkus.http.access-log.enabled": "false",
        }
        if self.basic_auth:
            user, password = self.basic_auth
            settings |= {
                "quarkus.http.auth.basic": "true",
                "quarkus.security.users.embedded.enabled": "true",
                "quarkus.security.users.embedded.plain-text": "true",
                f"quarkus.security.users.embedded.users.{user}": password,
                f"quarkus.security.users.embedded.roles.{user}": "sr-admin",
                "quarkus.http.auth.permission.all.paths": "/*",
                "quarkus.http.auth.permission.all.policy": "authenticated",
            }
        # in a file and not on the command line, which everybody can read: there may be a password
        file = self.folder / "config" / "application.properties"
        file.parent.mkdir(exist_ok=True)
        file.touch(mode=0o600)
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        artifacts.registry_folder(self._cache)

    def command(self) -> list[str]:
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        program = artifacts.registry_folder(self._cache) / "quarkus-run.jar"
        return [str(artifacts.bundled_java()), *options, "-jar", str(program)]

    def ready(self) -> bool:
        request = urllib.request.Request(f"{self.url}/subjects")
        if self.basic_auth:
            shown = base64.b64encode(":".join(self.basic_auth).encode()).decode()
            request.add_header("Authorization", f"Basic {shown}")
        try:
            with ports.open_url(request) as answer:
                return bool(answer.status == 200)
        except OSError:  # also raised for any status but 200
            return False
