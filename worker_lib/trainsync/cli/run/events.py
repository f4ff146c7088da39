"""``trainsync run events``."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from trainsync.api import words
from trainsync.cli.options import AsJson
from trainsync.cli.output.console import emit, guarded, say, stdout
from trainsync.cli.output.tables import new_table
from trainsync.cli.output.text import cell
from trainsync.cli.run import event_list, following
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.event_list import ClusterEvent
from trainsync.cli.run.following import PollTimes
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import (
    Context,
    Kubeconfig,
    Name,
    Namespace,
    Since,
    parse_since,
    with_cluster,
)
from trainsync.cli.run.report import RunReport


@guarded
def events(
    invocation: typer.Context,
    name: Name,
    warnings: Annotated[bool, typer.Option("--warnings", help="Only warnings.")] = False,
    since: Since = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended, or Ctrl-C.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """List the Kubernetes Events of a run and all that was made for it, the newest last.

    Kubernetes keeps them for an hour, if the cluster does not say otherwise. With --follow and
    --json: one document a line for each Event.
    """
    young = parse_since(since)
    target = KubeconfigOptions(namespace, context, kubeconfig)
    oldest = None if young is None else datetime.now(UTC) - young

    def wanted(event: ClusterEvent) -> bool:
        return (event.warning or not warnings) and (oldest is None or event.time >= oldest)

    if follow:
        pace = PollTimes.of(invocation)
        with_cluster(target, lambda cluster: _follow(cluster, name, wanted, as_json, pace))
        return
    found = [event for event in with_cluster(target, lambda c: of_run(c, name)) if wanted(event)]
    if as_json:
        emit({"events": [event.to_json_dict() for event in found]})
    elif found:
        _print(found)
    else:
        say("no such Event is there any more (Kubernetes keeps them for an hour)")


async def of_run(cluster: ClusterClient, name: str) -> list[ClusterEvent]:
    """The Events of the run of that name. Raises `ClusterError`."""
    _, found = await _look(cluster, name)
    return found


async def _look(cluster: ClusterClient, name: str) -> tuple[RunReport, list[ClusterEvent]]:
    run = reports.read(await cluster.run(name))  # first: a run that is not there is said so
    listed, others = await asyncio.gather(cluster.events(), cluster.run_names())
    return run, event_list.of_run(listed, run, others)


async def _follow(
    cluster: ClusterClient,
    name: str,
    wanted: Callable[[ClusterEvent], bool],
    as_json: bool,
    pace: PollTimes,
) -> None:
    """Tell each Event once, and again when its count has risen."""
    told: set[ClusterEvent] = set()
    ended = False

    def tell(found: tuple[RunReport, list[ClusterEvent]]) -> bool:
        nonlocal told, ended
        run, events_now = found
        for event in events_now:
            if event not in told and wanted(event):
                _tell(event, as_json)
        told = set(events_now)
        # The operator posts the Event of the end after the status that says so: one look more.
        before, ended = ended, run.ended
        return before and ended

    await following.follow(lambda: _look(cluster, name), tell, pace)


def _tell(event: ClusterEvent, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event.to_json_dict()))
        return
    parts = (words.clock(event.time), f"{event.kind}/{event.name}", event.reason, _said(event))
    line = Text("  ").join(cell(part, "yellow" if event.warning else "") for part in parts)
    stdout().print(line, soft_wrap=True)


def _said(event: ClusterEvent) -> str:
    return event.message + (f" ({event.count} times)" if event.count > 1 else "")


def _print(found: list[ClusterEvent]) -> None:
    table = new_table()
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("object", overflow="fold", max_width=34)
    table.add_column("reason", overflow="fold", max_width=20)
    table.add_column("message", overflow="fold")
    for event in found:
        style = "yellow" if event.warning else ""
        table.add_row(
            words.clock(event.time),
            cell(f"{event.kind}/{event.name}"),
            cell(event.reason, style),
            cell(_said(event), style),
        )
    stdout().print(table)
