"""Pipelines in the API server of Airflow: the app that answers what they report.

Every process of Airflow imports this, so it imports nothing of the package; the app is made when it is first asked.
"""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

#: where the app is mounted
PREFIX = "/bottledwater"


class _LazyApp:
    """An ASGI app that is made by its first request: only an API server gets any."""

    _app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from airflow_bottledwater.plugin.app import make

            type(self)._app = make()
        await self._app(scope, receive, send)


class BottledWaterPlugin(AirflowPlugin):
    """Pipelines, their state and their history in Airflow's API server."""

    name = "bottledwater"
    fastapi_apps: ClassVar[list[Any]] = [{"app": _LazyApp(), "url_prefix": PREFIX, "name": "Bottled Water"}]
