"""Which children of servers to create and to delete; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import budget, deployment, service
from trainsync_operator.builders.target import Target
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import DEPLOYMENT, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.child import Owner, owner_of
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.run import Problem, Run, SpecError
from trainsync_operator.reconcile.servers.reading import KINDS, is_of_servers


@dataclass
class Wanted:
    """Children to delete, and those that must be there, by entry of spec.servers."""

    delete: list[tuple[Kind, Object]] = field(default_factory=list)
    ensure: dict[str, list[tuple[Kind, Object]]] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)


def plan(target: Target, observed: Observed, *, serves: bool, ended: bool) -> Wanted:
    """The children of spec.servers to delete, and those that must exist.

    Args:
        serves: whether servers have pods now.
        ended: whether the run has finished: what serves then is left as it is.
    """
    result = Wanted()
    if serves and ended:
        return result
    result.delete = list(_removed(target.run, observed))
    for server in target.run.servers:
        try:
            result.ensure[server.name] = _children(target, server, observed, serves=serves)
        except SpecError as error:
            result.problems[server.name] = Problem("InvalidSpec", str(error))
    return result


def _children(
    target: Target, server: Server, observed: Observed, *, serves: bool
) -> list[tuple[Kind, Object]]:
    live = observed.live.get((DEPLOYMENT, names.server_name(target.run.name, server.name)))
    built = {
        "Service": service.build(target, server),
        "PodDisruptionBudget": budget.build(target, server),
        "Deployment": deployment.build(target, server, live, serves=serves),
    }
    return [(kind, built[kind.name]) for kind in KINDS]


def _removed(run: Run, observed: Observed) -> Iterator[tuple[Kind, Object]]:
    """Children of entries that the spec has no more."""
    kept = {names.server_name(run.name, server.name) for server in run.servers}
    for (kind, name), obj in observed.live.items():
        if kind not in KINDS or name in kept or not is_of_servers(obj):
            continue
        if owner_of(obj, run, kind) is Owner.OURS and not objects.being_deleted(obj):
            yield kind, obj
