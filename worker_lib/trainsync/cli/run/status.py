"""``trainsync run status``."""

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.live import Live

from trainsync.cli.console import DAMAGED, REFUSED, USAGE, CommandError, emit, guarded, say, stdout
from trainsync.cli.options import AsJson
from trainsync.cli.run import report as reports
from trainsync.cli.run import screen
from trainsync.cli.run.cluster import Cluster
from trainsync.cli.run.errors import ClusterError, NotReachedError
from trainsync.cli.run.kubeconfig import Target
from trainsync.cli.run.options import Context, Kubeconfig, Namespace, OptionalName, with_cluster
from trainsync.cli.run.report import RunReport

_AGAIN_SECONDS: Final = 2.0
# So long an API server may be away amid --watch.
_PATIENCE_SECONDS: Final = 120.0


@guarded
def status(
    name: OptionalName = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until the run has ended, or Ctrl-C.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run does: one screen. Without NAME: all runs of the namespace, a line each.

    With --watch and --json: one document a line whenever the run has changed.
    """
    target = Target(namespace, context, kubeconfig)
    if name is None:
        if watch:
            raise CommandError("--watch needs the NAME of a run", USAGE)
        if not with_cluster(target, lambda cluster: _show_all(cluster, as_json)):
            raise typer.Exit(REFUSED)
        return
    if watch:
        last = with_cluster(target, lambda cluster: _watch(cluster, name, as_json))
    else:
        last = with_cluster(target, lambda cluster: _look(cluster, name))
        if as_json:
            emit(last.to_json_dict())
        else:
            stdout().print(screen.screen(last))
    if last.failed:
        raise typer.Exit(DAMAGED)


async def _look(cluster: Cluster, name: str) -> RunReport:
    return reports.read(await cluster.run(name), datetime.now(UTC))


async def _show_all(cluster: Cluster, as_json: bool) -> bool:
    """Whether all could be read; those that could not are named on stderr."""
    found, unread = [], 0
    for run in await cluster.runs():
        try:
            found.append(reports.read(run))
        except ClusterError as error:
            unread += 1
            say(str(error), "red")
    if as_json:
        emit({"runs": [report.to_json_dict() for report in found]})
    elif found:
        stdout().print(screen.summary(found))
    elif not unread:
        say(
            f"there is no TrainingRun in namespace {cluster.namespace}: give -n NAMESPACE, or see "
            "`kubectl get trainingruns -A`"
        )
    return not unread


async def _watch(cluster: Cluster, name: str, as_json: bool) -> RunReport:
    console = stdout()
    if console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            return await _follow(
                cluster, name, lambda report: live.update(screen.screen(report), refresh=True)
            )
    before: list[object] = []

    def tell(report: RunReport) -> None:
        if before and before[-1] == report.raw_status:
            return
        before[:] = [report.raw_status]
        if as_json:
            typer.echo(json.dumps(report.to_json_dict()))
        else:
            typer.echo(screen.line(report))

    return await _follow(cluster, name, tell)


async def _follow(cluster: Cluster, name: str, tell: Callable[[RunReport], None]) -> RunReport:
    """Tell until the run has ended; an API server that is away is asked again for a while."""
    heard = time.monotonic()
    while True:
        try:
            found = await _look(cluster, name)
        except NotReachedError as error:
            if time.monotonic() - heard > _PATIENCE_SECONDS:
                raise
            say(f"{error}; asking again", "yellow")
        else:
            heard = time.monotonic()
            tell(found)
            if found.ended:
                return found
        await asyncio.sleep(_AGAIN_SECONDS)
