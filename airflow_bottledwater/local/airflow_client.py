"""A small client of Airflow's REST API, since each call of Airflow's command line takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import requests

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.waiting import until

Json = dict[str, Any]

#: seconds for one answer: on a busy machine the API server needs half a minute
_ANSWER = 120


class AirflowClient:
    """A user's session with an API server."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url = url
        self._user, self._password = user, password
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, no .netrc

    def request(self, method: str, path: str, **arguments: Any) -> Json:
        """Make one call of the API; `path` is the part after /api/v2/."""
        if "Authorization" not in self._session.headers:
            self._login()
        answer = self._session.request(method, f"{self.url}/api/v2/{path}", timeout=_ANSWER, **arguments)
        if answer.status_code == requests.codes.unauthorized:
            self._login()
            answer = self._session.request(method, f"{self.url}/api/v2/{path}", timeout=_ANSWER, **arguments)
        if not answer.ok:
            raise LocalServerError(f"Airflow answered {answer.status_code} to {method} {path}: {_detail(answer)}")
        content: Json = answer.json() if answer.content else {}
        return content

    def wait_for_dag(self, dag_id: str, timeout: float = 60) -> Json:
        """Wait until Airflow knows the DAG, and return it."""

        def known() -> Json | None:
            # by a filter, since a request for the DAG itself would be answered with 404 until then
            found = self.request("GET", "dags", params={"dag_id_pattern": dag_id, "limit": 1_000})["dags"]
            return next((dict(dag) for dag in found if dag["dag_id"] == dag_id), None)

        return until(known, timeout=timeout, otherwise=lambda: f"DAG {dag_id} did not appear{self._import_errors()}")

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run and return its id."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return str(self.request("POST", f"dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> Json:
        """The run."""
        return self.request("GET", f"dags/{dag_id}/dagRuns/{run_id}")

    def task_instances(self, dag_id: str, run_id: str) -> list[Json]:
        """The task instances of a run."""
        answer = self.request("GET", f"dags/{dag_id}/dagRuns/{run_id}/taskInstances", params={"limit": 1_000})
        return list(answer["task_instances"])

    def set_task_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Mark a task as a user does (`success`, `failed`)."""
        path = f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        self.request("PATCH", path, json={"new_state": state})

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run as a user does (`success`, `failed`, `queued`)."""
        self.request("PATCH", f"dags/{dag_id}/dagRuns/{run_id}", json={"state": state})

    def clear(self, dag_id: str, run_id: str, task_ids: Iterable[str], *, downstream: bool = False) -> None:
        """Clear tasks, whatever their state, so that they run again."""
        body = {"dry_run": False, "dag_run_id": run_id, "task_ids": list(task_ids), "only_failed": False}
        body |= {"reset_dag_runs": True, "include_downstream": downstream}
        self.request("POST", f"dags/{dag_id}/clearTaskInstances", json=body)

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The log of one try as text, one line for each event."""
        path = f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self.request("GET", path, params={"full_content": True})["content"]
        return "\n".join(event if isinstance(event, str) else _line(event) for event in content)

    def wait_run(self, dag_id: str, run_id: str, timeout: float = 120) -> Json:
        """Wait until the run has succeeded or failed, and return it."""

        def ended() -> Json | None:
            run = self.run(dag_id, run_id)
            return run if run["state"] in ("success", "failed") else None

        def states() -> str:
            tasks = self.task_instances(dag_id, run_id)
            return f"run {run_id} of {dag_id} did not end: " + ", ".join(f"{t['task_id']} {t['state']}" for t in tasks)

        return until(ended, timeout=timeout, otherwise=states, pause=0.5)

    def _login(self) -> None:
        body = {"username": self._user, "password": self._password}
        answer = self._session.post(f"{self.url}/auth/token", json=body, timeout=_ANSWER)
        if not answer.ok:
            raise LocalServerError(f"Airflow refuses the login: {answer.status_code} {_detail(answer)}")
        self._session.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def _import_errors(self) -> str:
        errors = self.request("GET", "importErrors")["import_errors"]
        lines = [f"{error['filename']}: {error['stack_trace'].strip().splitlines()[-1]}" for error in errors]
        return "".join(f"; {line}" for line in lines)


def _detail(answer: requests.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]


def _line(event: Json) -> str:
    """Time, level, message and the other fields of an event, as a line."""
    fields = dict(event)
    head = [str(fields.pop(name)) for name in ("timestamp", "level", "event") if fields.get(name)]
    fields.pop("logger", None)
    return " ".join(head + [f"{name}={value}" for name, value in fields.items() if value is not None])
