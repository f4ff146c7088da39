"""``trainsync run events``."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from trainsync.api import words
from trainsync.cli.console import emit, guarded, say, stdout
from trainsync.cli.options import AsJson
from trainsync.cli.run import happenings
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import Cluster
from trainsync.cli.run.happenings import Happening
from trainsync.cli.run.kubeconfig import Target
from trainsync.cli.run.options import (
    Context,
    Kubeconfig,
    Name,
    Namespace,
    Since,
    parse_since,
    with_cluster,
)
from trainsync.cli.tables import new_table
from trainsync.cli.text import cell


@guarded
def events(
    name: Name,
    warnings: Annotated[bool, typer.Option("--warnings", help="Only warnings.")] = False,
    since: Since = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """List the Kubernetes Events of a run and all that was made for it, the newest last.

    Kubernetes keeps them for an hour, if the cluster does not say otherwise.
    """
    young = parse_since(since)
    target = Target(namespace, context, kubeconfig)
    found = with_cluster(target, lambda cluster: of_run(cluster, name))
    oldest = None if young is None else datetime.now(UTC) - young
    found = [
        event
        for event in found
        if (event.warning or not warnings) and (oldest is None or event.time >= oldest)
    ]
    if as_json:
        emit({"events": [event.to_json_dict() for event in found]})
    elif found:
        _print(found)
    else:
        say("no such Event is there any more (Kubernetes keeps them for an hour)")


async def of_run(cluster: Cluster, name: str) -> list[Happening]:
    """The Events of the run of that name. Raises `ClusterError`."""
    run = reports.read(await cluster.run(name))  # first: a run that is not there is said so
    listed, others = await asyncio.gather(cluster.events(), cluster.run_names())
    return happenings.of_run(listed, run, others)


def _print(found: list[Happening]) -> None:
    table = new_table()
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("object", overflow="fold", max_width=34)
    table.add_column("reason", overflow="fold", max_width=20)
    table.add_column("message", overflow="fold")
    for event in found:
        times = f" ({event.count} times)" if event.count > 1 else ""
        style = "yellow" if event.warning else ""
        table.add_row(
            words.clock(event.time),
            cell(f"{event.kind}/{event.name}"),
            cell(event.reason, style),
            cell(event.message + times, style),
        )
    stdout().print(table)
