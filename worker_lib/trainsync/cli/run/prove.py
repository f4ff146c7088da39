"""``trainsync run prove``."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import typer

from trainsync.api import names
from trainsync.api.status import ProofVerdict, ServerWeights, TrainingRunStatus
from trainsync.cli.options import AsJson
from trainsync.cli.output.console import DAMAGED, USAGE, CommandError, emit, guarded, say, stdout
from trainsync.cli.output.tables import new_table
from trainsync.cli.output.text import cell
from trainsync.cli.run import report as reports
from trainsync.cli.run.cluster import ClusterClient
from trainsync.cli.run.errors import ClusterError
from trainsync.cli.run.kubeconfig import KubeconfigOptions
from trainsync.cli.run.options import Context, Kubeconfig, Name, Namespace, with_cluster

PROVE_EXIT_CODES: Final = (
    "Exit codes: 0 all are proven; 1 some are not, or were not asked; 2 wrong usage, no such run, "
    "or no servers; 3 the cluster was not reached or refused."
)
_AT_ONCE: Final = 8
_STYLES: Final = {ProofVerdict.PROVEN.value: "green", ProofVerdict.REFUTED.value: "red"}


@dataclass(frozen=True)
class _Answer:
    """What one server's agent says; ``verdict`` None: nothing could be compared."""

    server: str
    version: str | None
    verdict: str | None
    reason: str | None
    largest: float | None

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "version": self.version,
            "verdict": self.verdict,
            "reason": self.reason,
            "largestNats": self.largest,
        }


@guarded
def prove(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_json: AsJson = False,
) -> None:
    """Ask each server of a run for its canaries now, and compare.

    Servers stay ready meanwhile. One that is refuted is loaded anew by its agent, as after an
    update; one that does not answer its agent is not ready until it does. Layers are compared in
    updates alone.
    """
    target = KubeconfigOptions(namespace, context, kubeconfig)
    answers, not_asked = with_cluster(target, lambda cluster: _ask_all(cluster, name))
    if as_json:
        servers = [answer.to_json_dict() for answer in answers]
        emit({"servers": servers, "notAsked": not_asked})
    else:
        _show(answers)
    for entry, count in not_asked.items():
        say(f"not asked: {count} of {entry}, which the run's status does not name", "yellow")
    if not_asked or any(answer.verdict != ProofVerdict.PROVEN.value for answer in answers):
        raise typer.Exit(DAMAGED)


async def _ask_all(cluster: ClusterClient, name: str) -> tuple[list[_Answer], dict[str, int]]:
    """The answers, and how many servers of each entry were not asked."""
    status = reports.read(await cluster.run(name)).status
    reporting = status.weights.servers if status.weights else []
    servers = sorted(server.name for server in reporting)
    if not servers:
        raise CommandError(
            f"no server of run {name} has reported within a minute: see its condition ServersReady",
            USAGE,
        )
    turns = asyncio.Semaphore(_AT_ONCE)

    async def ask(server: str) -> _Answer:
        async with turns:
            return await _ask(cluster, server)

    return list(await asyncio.gather(*map(ask, servers))), _not_named(status, reporting)


def _not_named(status: TrainingRunStatus, reporting: list[ServerWeights]) -> dict[str, int]:
    """Servers, by entry, that do not report, or are too many for a status."""
    named = Counter(server.servers for server in reporting)
    entries = {entry.name: entry.replicas - named[entry.name] for entry in status.servers or []}
    return {name: count for name, count in entries.items() if count > 0}


async def _ask(cluster: ClusterClient, server: str) -> _Answer:
    pod = f"{server}:{names.AGENT_PORT}"
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/proxy/prove"
    try:
        found = await cluster.get(path, f"pods/proxy of {pod}")
    except ClusterError as error:
        return _Answer(server, None, None, str(error), None)
    version, verdict, reason = (_text(found, key) for key in ("version", "verdict", "reason"))
    largest = found.get("largestNats")
    off = float(largest) if isinstance(largest, int | float) else None
    return _Answer(server, version, verdict, reason, off)


def _text(found: dict[str, Any], key: str) -> str | None:
    value = found.get(key)
    return None if value is None else str(value)


def _show(answers: list[_Answer]) -> None:
    table = new_table()
    for heading in ("server", "version", "proof", "off by, nats", ""):
        table.add_column(heading, overflow="fold")
    for answer in answers:
        verdict = answer.verdict or "not compared"
        table.add_row(
            cell(answer.server),
            cell(answer.version or "none"),
            cell(verdict, _STYLES.get(verdict, "yellow")),
            "" if answer.largest is None else f"{answer.largest:.3g}",
            cell(answer.reason or ""),
        )
    stdout().print(table)
