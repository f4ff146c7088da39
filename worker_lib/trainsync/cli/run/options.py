"""Arguments and options that the commands of ``trainsync run`` share."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from trainsync.cli.output.console import USAGE, CommandError
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.kubeconfig import KubeconfigOptions, connect

RUN_EXIT_CODES: Final = (
    "Exit codes: 0 shown; 1 the run has failed; 2 wrong usage, or no such run; 3 the cluster was "
    "not reached or refused."
)

ResultT = TypeVar("ResultT")

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COMPLETION_SECONDS: Final = 3.0


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    given = context.params
    target = KubeconfigOptions(
        given.get("namespace"), given.get("context"), given.get("kubeconfig")
    )

    async def names(cluster: ClusterClient) -> list[str]:
        async with asyncio.timeout(_COMPLETION_SECONDS):
            return await cluster.run_names()

    try:
        found = with_cluster(target, names)
    except (CommandError, OSError, TimeoutError):
        return []  # a shell that completes words has no place for errors
    return [name for name in found if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The TrainingRun.", autocompletion=_complete)
]
OptionalName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="The TrainingRun; without one, all.", autocompletion=_complete
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace of the run (default: the context's)."),
]
Context = Annotated[
    str | None, typer.Option(help="Context of the kubeconfig (default: the active one).")
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Kubeconfig file (default: KUBECONFIG, ~/.kube/config, or the pod's own cluster)."
    ),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only what is younger: 30s, 10m, 2h, 1d."),
]


def with_cluster(
    target: KubeconfigOptions, work: Callable[[ClusterClient], Coroutine[Any, Any, ResultT]]
) -> ResultT:
    """``work`` with a client of the cluster that the options mean.

    Raises:
        CommandError: it was not reached, or refused; or the Kubernetes client is not installed.
    """

    async def run() -> ResultT:
        async with connect(target) as connection:
            return await work(ClusterClient(connection))

    return asyncio.run(run())


def parse_since(text: str | None) -> timedelta | None:
    """``10m`` as a timedelta.

    Raises:
        CommandError: it is nothing of that kind.
    """
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdecimal() or len(number) > 6:
        raise CommandError(f"--since {text}: expected a time such as 30s, 10m, 2h or 1d", USAGE)
    return timedelta(seconds=int(number) * _UNITS[unit])
