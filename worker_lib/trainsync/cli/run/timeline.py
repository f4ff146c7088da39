"""``trainsync run timeline``."""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

import typer
from pydantic import ValidationError

from trainsync.api import names, words
from trainsync.api.page import RunPage
from trainsync.cli.options import AsJson
from trainsync.cli.output.console import DAMAGED, emit, guarded, say, stdout
from trainsync.cli.output.tables import new_table
from trainsync.cli.output.text import cell
from trainsync.cli.run import events, timeline_entries
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.errors import ClusterError
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import Context, Kubeconfig, Name, Namespace, with_cluster
from trainsync.cli.run.report import RunReport
from trainsync.cli.run.timeline_entries import EntryKind, TimelineEntry

_WIDTH: Final = 60
_STYLES: Final = {
    EntryKind.FAULT: "red",
    EntryKind.RESTART: "yellow",
    EntryKind.COMMIT: "green",
    EntryKind.ATTEMPT: "cyan",
    EntryKind.STATE: "",
}


@dataclass(frozen=True)
class _Told:
    run: RunReport
    entries: list[TimelineEntry]
    missing: list[str]


@guarded
def timeline(
    name: Name,
    everything: Annotated[
        bool, typer.Option("--all", help="Every commit on a line of its own.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """Tell attempts, commits, faults and restarts of a run in the order of time.

    From its Events, its status and its monitor; what cannot be had is said on stderr.
    """
    told = with_cluster(
        KubeconfigOptions(namespace, context, kubeconfig), lambda found: _ask(found, name)
    )
    for text in told.missing:
        say(text, "yellow")
    if as_json:
        emit({"entries": [entry.to_json_dict() for entry in told.entries], "missing": told.missing})
    else:
        _print(told, everything=everything)
    if told.run.failed:
        raise typer.Exit(DAMAGED)


async def _ask(cluster: ClusterClient, name: str) -> _Told:
    run = reports.read(await cluster.run(name))
    missing: list[str] = []
    found, page = await asyncio.gather(
        events.of_run(cluster, name), monitor_page(cluster, name), return_exceptions=True
    )
    for answer, what in ((found, "Events"), (page, "the monitor's part")):
        if isinstance(answer, ClusterError):
            missing.append(f"without {what}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
    if isinstance(page, RunPage) and page.problem is not None:
        missing.append(f"the monitor says: {page.problem}")
    entries = timeline_entries.tell(
        run,
        found if isinstance(found, list) else [],
        page if isinstance(page, RunPage) else None,
    )
    return _Told(run, entries, missing)


async def monitor_page(cluster: ClusterClient, name: str) -> RunPage:
    """The answer of the run's monitor, through the API server (the right ``get services/proxy``).

    Raises:
        ClusterError: it does not answer, or not in this version's words.
    """
    service = f"{names.monitor_name(name)}:{names.MONITOR_PORT}"
    path = f"/api/v1/namespaces/{cluster.namespace}/services/{service}/proxy/status.json"
    found = await cluster.get(path, f"services/proxy of {service}")
    try:
        return RunPage.model_validate(found, extra="ignore")
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ClusterError(
            f"the monitor's {where} is none that this version of trainsync can read"
        ) from error


def _print(told: _Told, *, everything: bool) -> None:
    console = stdout()
    if not told.entries:
        say("nothing has happened yet")
        return
    _print_strip(told)
    table = new_table()
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("", overflow="fold")
    lines = (
        [(entry, entry.text) for entry in told.entries]
        if everything
        else timeline_entries.gathered(told.entries)
    )
    for entry, text in lines:
        style = _STYLES[entry.what]
        table.add_row(words.clock(entry.time), cell(entry.what, style), cell(text, style))
    console.print(table)


def _print_strip(told: _Told) -> None:
    end: datetime = told.run.status.completion_time or told.run.now
    console = stdout()
    for lane, text in timeline_entries.strip(told.entries, max(end, told.entries[-1].time), _WIDTH):
        console.print(f"{lane:12}{text}", markup=False, style=_LANES[lane])
    first, last = words.clock(told.entries[0].time), words.clock(end)
    console.print(f"{'':12}{first}{last:>{_WIDTH - len(first)}}", style="dim")


_LANES: Final = {"attempt": "cyan", "checkpoints": "green", "faults": "red"}
