"""The subcommands about all pipelines of a Kafka: ``metrics`` gives their numbers to Prometheus or OpenTelemetry,
``top`` shows them in a terminal."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from airflow_bottledwater import extras
from airflow_bottledwater.cli.log import console
from airflow_bottledwater.cli.options import LONGEST, Number, kafka_of, kafka_options
from airflow_bottledwater.errors import BottledWaterError, Refused

if TYPE_CHECKING:
    from airflow_bottledwater.metrics.pipelines import Pipelines

log = logging.getLogger("bottledwater")


@contextlib.contextmanager
def _pipelines(values: dict[str, Any]) -> Iterator[Pipelines]:
    from airflow_bottledwater.metrics.pipelines import Pipelines

    with contextlib.closing(Pipelines(kafka_of(values))) as found:
        yield found


@click.command("metrics")
@kafka_options
@click.option(
    "--listen",
    default="127.0.0.1:9187",
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Where Prometheus reads them, by HTTP without a password.",
)
@click.option("--otlp", metavar="URL", help="Push them to this collector (…/v1/metrics) instead.")
@click.option(
    "--interval",
    type=Number(min=1, max=LONGEST),
    default=10.0,
    show_default=True,
    help="Of --otlp: seconds between two.",
)
@click.option("--once", is_flag=True, help="Print them once, as Prometheus' text, or push them once.")
def metrics_command(listen: str, otlp: str | None, interval: float, once: bool, **values: Any) -> None:
    """Give the numbers of all pipelines of a Kafka to Prometheus, or push them by OTLP."""
    extras.require("metrics")
    with _pipelines(values) as found:
        if otlp is not None:
            _push(found, otlp, interval, once=once)
        elif once:
            from prometheus_client import generate_latest

            from airflow_bottledwater.metrics.prometheus import collector

            click.echo(generate_latest(collector(found.look)).decode(), nl=False)
        else:
            _serve(found, listen)


def _serve(found: Pipelines, listen: str) -> None:
    from airflow_bottledwater.metrics.prometheus import serve

    address, _, port = listen.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise click.UsageError(f"--listen must be ADDRESS:PORT, not {listen!r}")
    try:
        end = serve(found.look, address.strip("[]"), int(port))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is no address"
        raise Refused(f"Port {listen} cannot be used: {why}.", "Choose another with --listen.") from error
    log.info("Metrics of all pipelines at http://%s/metrics.", listen)
    try:
        threading.Event().wait()
    finally:
        end()


def _push(found: Pipelines, url: str, interval: float, *, once: bool) -> None:
    from airflow_bottledwater.metrics.otlp import Pusher

    with contextlib.closing(Pusher(url)) as pusher:
        refused = False
        while True:
            try:
                taken = pusher.push(found.look())
            except BottledWaterError as error:
                if once:
                    raise
                log.warning("%s", error)
                taken = True
            if once:
                if not taken:
                    raise Refused(f"The collector at {url} does not take the metrics.", "Check the URL and its log.")
                return
            if taken == refused:
                refused = not taken
                log.warning("The collector at %s %s.", url, "does not answer" if refused else "answers again")
            time.sleep(interval)


@click.command("top")
@kafka_options
@click.option("-s", "--slot", default="", help="Only the pipeline of this slot, with its tables.")
@click.option(
    "--interval", type=Number(min=0.2, max=LONGEST), default=2.0, show_default=True, help="Seconds between two."
)
@click.option("--once", is_flag=True, help="Print it once.")
def top_command(slot: str, interval: float, once: bool, **values: Any) -> None:
    """Show the pipelines of a Kafka live in a terminal: what is wrong first. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from airflow_bottledwater.cli.top import screen

    with _pipelines(values) as found:
        if once:
            Console(markup=False).print(screen(found, slot))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while not console.quiet:  # somebody sees it
                live.update(screen(found, slot), refresh=True)
                time.sleep(interval)
