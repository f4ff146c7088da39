"""``trainsync run status``."""

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.live import Live

from trainsync.cli.options import AsJson
from trainsync.cli.output.console import (
    DAMAGED,
    REFUSED,
    USAGE,
    CommandError,
    emit,
    guarded,
    say,
    stdout,
)
from trainsync.cli.run import report as reports
from trainsync.cli.run import screen
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.errors import ClusterError
from trainsync.cli.run.following import PollTimes, follow
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import Context, Kubeconfig, Namespace, OptionalName, with_cluster
from trainsync.cli.run.report import RunReport


@guarded
def status(
    invocation: typer.Context,
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
    target = KubeconfigOptions(namespace, context, kubeconfig)
    if name is None:
        if watch:
            raise CommandError("--watch needs the NAME of a run", USAGE)
        if not with_cluster(target, lambda cluster: _show_all(cluster, as_json)):
            raise typer.Exit(REFUSED)
        return
    if watch:
        pace = PollTimes.of(invocation)
        last = with_cluster(target, lambda cluster: _watch(cluster, name, as_json, pace))
    else:
        last = with_cluster(target, lambda cluster: _look(cluster, name))
        if as_json:
            emit(last.to_json_dict())
        else:
            stdout().print(screen.screen(last))
    if last.failed:
        raise typer.Exit(DAMAGED)


async def _look(cluster: ClusterClient, name: str) -> RunReport:
    return reports.read(await cluster.run(name), datetime.now(UTC))


async def _show_all(cluster: ClusterClient, as_json: bool) -> bool:
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


async def _watch(cluster: ClusterClient, name: str, as_json: bool, pace: PollTimes) -> RunReport:
    console = stdout()
    if console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False, screen=False) as live:

            def show(report: RunReport) -> bool:
                live.update(screen.screen(report), refresh=True)
                return report.ended

            return await follow(lambda: _look(cluster, name), show, pace)
    before: list[object] = []

    def tell(report: RunReport) -> bool:
        if before != [report.raw_status]:
            before[:] = [report.raw_status]
            typer.echo(json.dumps(report.to_json_dict()) if as_json else screen.line(report))
        return report.ended

    return await follow(lambda: _look(cluster, name), tell, pace)
