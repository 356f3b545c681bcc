"""The page in Airflow: its entry in the navigation, its tabs and its card, and the app that answers it.

Every process of Airflow imports this, so it imports nothing of the package; the app is made when it is first asked.
"""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

#: where the app is mounted, and the route of the page
PREFIX, ROUTE = "/bottledwater", "bottledwater"


class _LazyApp:
    """An ASGI app that is made by its first request: only an API server gets any."""

    _app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from airflow_bottledwater.plugin.app import make

            type(self)._app = make()
        await self._app(scope, receive, send)


def _place(destination: str, route: str, **more: Any) -> dict[str, Any]:
    """A place where Airflow shows the page."""
    # only the path: a browser may know this server by another name
    base = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
    return {
        "name": "Bottled Water",
        "bundle_url": f"{base}{PREFIX}/static/main.umd.cjs",
        "destination": destination,
        "url_route": route,
        "icon": f"{base}{PREFIX}/static/icon.svg",
        "icon_dark_mode": f"{base}{PREFIX}/static/icon-dark.svg",
        **more,
    }


class BottledWaterPlugin(AirflowPlugin):
    """Pipelines, their state and their history in Airflow's own interface."""

    name = "bottledwater"
    fastapi_apps: ClassVar[list[Any]] = [{"app": _LazyApp(), "url_prefix": PREFIX, "name": "Bottled Water"}]
    react_apps: ClassVar[list[dict[str, Any]]] = [
        _place("nav", ROUTE, category="browse"),
        _place("dag", f"{ROUTE}-dag"),
        _place("task_instance", f"{ROUTE}-task"),
        _place("dashboard", f"{ROUTE}-card"),
    ]
