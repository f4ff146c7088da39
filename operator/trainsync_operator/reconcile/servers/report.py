"""The part of the status about servers; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainsync.api import names
from trainsync.api.servers import Server
from trainsync.api.status import ServersStatus

from trainsync_operator.builders.servers import leader_worker_set
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import DEPLOYMENT
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.run import Problem, Run, State
from trainsync_operator.reconcile.servers import groups
from trainsync_operator.reconcile.servers.wanted import workload

_SUSPENDED = "The run is suspended, and its servers with it: they come back when it resumes."


@dataclass(frozen=True)
class Verdict:
    """The condition ServersReady."""

    ready: bool
    reason: str
    message: str


def entries(
    run: Run, observed: Observed, problems: Mapping[str, Problem]
) -> list[ServersStatus] | None:
    """The state of each entry; None of a run without servers."""
    return [_entry(run, server, observed, problems) for server in run.servers] or None


def _entry(
    run: Run, server: Server, observed: Observed, problems: Mapping[str, Problem]
) -> ServersStatus:
    live = _workload(run, server, observed)
    problem = problems.get(server.name)
    said = problem.message if problem else _complaint(server, live, observed)
    if server.nodes == 1:
        asked = (live.get("spec") or {}).get("replicas", 1) if live else server.replicas
        status = objects.status(live)
        ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
    else:
        asked = leader_worker_set.asked(live) if live else server.replicas
        ready = groups.ready(server, observed)
        updated = groups.of_template(server, observed, leader_worker_set.template_of(live))
    return ServersStatus(
        name=server.name,
        url=names.server_url(run.name, run.namespace, server.name, server.port),
        replicas=1 if asked is None else asked,
        ready_replicas=ready,
        updated_replicas=updated,
        message=said,
    )


def _workload(run: Run, server: Server, observed: Observed) -> Object:
    name = names.server_name(run.name, server.name)
    return observed.live.get((workload(server), name)) or {}


def _complaint(server: Server, live: Object, observed: Observed) -> str | None:
    failure = objects.condition(live, "ReplicaFailure") or {}
    if failure.get("status") == "True":
        return f"Its pods cannot be made: {failure.get('message')}"
    return observed.server_problems.get(server.name)


def _is_rolled_out(live: Object, entry: ServersStatus) -> bool:
    if live.get("kind") == DEPLOYMENT.name:
        seen = objects.status(live).get("observedGeneration")
        known = seen is not None and seen == objects.metadata(live).get("generation")
    else:  # the counts are of its pods, and tell of the templates that they were made from
        known = bool(live) and names.ANNOTATION_SURGE_OF not in objects.annotations(live)
    updated = min(entry.ready_replicas, entry.updated_replicas)
    return known and updated >= entry.replicas


def verdict(
    run: Run,
    state: State,
    observed: Observed,
    found: list[ServersStatus] | None,
    problems: Mapping[str, Problem],
) -> Verdict | None:
    """Whether all servers of all entries are ready; None of a run without servers."""
    if not found:
        return None
    refused = next((problems[entry.name] for entry in found if entry.name in problems), None)
    if refused is not None:
        return Verdict(False, refused.reason, refused.message)
    if state.suspended:
        return Verdict(False, "Suspended", _SUSPENDED)
    for server, entry in zip(run.servers, found, strict=True):
        if _is_rolled_out(_workload(run, server, observed), entry):
            continue
        of = f"Servers {entry.name}: {entry.ready_replicas} of {entry.replicas} are ready"
        new = f", {entry.updated_replicas} of the present template."
        more = f" {entry.message}" if entry.message else ""
        return Verdict(False, "NotAllReady", of + new + more)
    if state.outcome is not None and not any(entry.replicas for entry in found):
        return Verdict(False, "Finished", "The run has finished, and its servers with it.")
    return Verdict(True, "AllReady", "All servers are ready.")


def ready_count(found: list[ServersStatus] | None) -> str | None:
    """Such as ``3/4``."""
    if not found:
        return None
    ready, asked = (sum(getattr(e, key) for e in found) for key in ("ready_replicas", "replicas"))
    return f"{ready}/{asked}"


def problem_word(run: Run, observed: Observed) -> str | None:
    """The obstacle to the start of a server, in the few words that a table has room for."""
    texts = (observed.server_problems.get(server.name) for server in run.servers)
    return next((text.split(": ")[1] for text in texts if text), None)
