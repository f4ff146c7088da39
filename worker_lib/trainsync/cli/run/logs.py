"""``trainsync run logs``."""

from enum import StrEnum
from typing import Annotated, Final

import typer

from trainsync.cli.output.console import USAGE, CommandError, guarded
from trainsync.cli.run import log_sources, loglines
from trainsync.cli.run.cluster import Cluster
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


class Part(StrEnum):
    """Whose lines."""

    DRIVER = "driver"
    MONITOR = "monitor"
    OPERATOR = "operator"


_MOST_LINES: Final = 1_000_000


@guarded
def logs(
    name: Name,
    part: Annotated[
        Part,
        typer.Option(
            help="driver: the training job, with what its workers print; monitor: who commits; "
            "operator: what it says of this run."
        ),
    ] = Part.DRIVER,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the log ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int, typer.Option(min=1, max=_MOST_LINES, help="Begin with the last so many lines.")
    ] = 200,
    since: Since = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="The driver of this attempt; else the newest.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The driver of this cluster; else of the one that trains.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the log of a part of a run, of the training job if no other is named.

    The driver's log is asked of Ray's dashboard through the API server (the right `get
    services/proxy`); Ray keeps no times in it, so --since is for the other parts.
    """
    young = parse_since(since)
    if part is Part.DRIVER and young is not None:
        raise CommandError("--since: Ray's log of the driver has no times; use --tail", USAGE)
    if part is not Part.DRIVER and attempt is not None:
        raise CommandError(f"--attempt is for --part driver, not for {part.value}", USAGE)
    if part is not Part.DRIVER and cluster is not None:
        raise CommandError(f"--cluster is for --part driver, not for {part.value}", USAGE)

    async def print_all(client: Cluster) -> None:
        if part is Part.DRIVER:
            lines = log_sources.driver(client, name, attempt, cluster, follow=follow, tail=tail)
            async for line in lines:
                typer.echo(loglines.plain(line))
            return
        source = log_sources.monitor if part is Part.MONITOR else log_sources.operator
        async for line in source(client, name, follow=follow, tail=tail, since=young):
            typer.echo(loglines.structured(line))

    with_cluster(Target(namespace, context, kubeconfig), print_all)
