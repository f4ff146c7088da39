"""Which children of servers to create and to delete; pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import budget, deployment, leader_worker_set, service
from trainsync_operator.builders.target import Target
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import BUDGET, DEPLOYMENT, LEADER_WORKER_SET, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.child import Owner, owner_of
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.run import Problem, Run, SpecError
from trainsync_operator.reconcile.servers import groups
from trainsync_operator.reconcile.servers.reading import KINDS, is_of_servers

_LWS: Final = "https://lws.sigs.k8s.io"
_ALLOW: Final = "set leaderWorkerSets.enabled of the operator's chart"


@dataclass
class ServerChildren:
    """Children to delete, and those that must be there, by entry of spec.servers."""

    delete: list[tuple[Kind, Object]] = field(default_factory=list)
    ensure: dict[str, list[tuple[Kind, Object]]] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)


def plan(target: Target, observed: Observed, *, serves: bool, ended: bool) -> ServerChildren:
    """The children of spec.servers to delete, and those that must exist.

    Args:
        serves: whether servers have pods now.
        ended: whether the run has finished: what serves then is left as it is.
    """
    result = ServerChildren()
    if serves and ended:
        return result
    result.delete = list(_removed(target.run, observed))
    for server in target.run.servers:
        if server.nodes > 1 and not observed.makes_groups:
            result.problems[server.name] = missing(server, f"install LWS ({_LWS}), and {_ALLOW}")
            continue
        try:
            result.ensure[server.name] = _children(target, server, observed, serves=serves)
        except SpecError as error:
            result.problems[server.name] = Problem("InvalidSpec", str(error))
    return result


def _children(
    target: Target, server: Server, observed: Observed, *, serves: bool
) -> list[tuple[Kind, Object]]:
    kind = workload(server)
    live = observed.live.get((kind, names.server_name(target.run.name, server.name)))
    if kind is DEPLOYMENT:
        built = deployment.build(target, server, live, serves=serves)
    else:
        mark = leader_worker_set.template_of(live or {})
        renewed = groups.renewed(server, observed, mark)
        built = leader_worker_set.build(target, server, live, serves=serves, renewed=renewed)
    return [
        (SERVICE, service.build(target, server)),
        (BUDGET, budget.build(target, server)),
        (kind, built),
    ]


def workload(server: Server) -> Kind:
    """The kind that makes an entry's pods."""
    return DEPLOYMENT if server.nodes == 1 else LEADER_WORKER_SET


def missing(server: Server, remedy: str) -> Problem:
    """Why servers of several nodes cannot be made."""
    message = f"Servers {server.name} have {server.nodes} nodes each, which needs LeaderWorkerSets"
    return Problem("LeaderWorkerSetMissing", f"{message}: {remedy}.")


def why_missing(server: Server, error: ApiRefusedError) -> Problem | None:
    """That LeaderWorkerSets are not there, or that the operator may not make them; None: neither.

    Args:
        error: the answer to an apply.
    """
    if error.status == HTTPStatus.NOT_FOUND:
        return missing(server, f"install LWS ({_LWS})")
    # A quota is told of with 403, too.
    if error.status == HTTPStatus.FORBIDDEN and 'User "' in str(error):
        return missing(server, _ALLOW)
    return None


def _removed(run: Run, observed: Observed) -> Iterator[tuple[Kind, Object]]:
    """Children of entries that the spec has no more, or has with one node, or with several."""
    kept = {
        (kind, names.server_name(run.name, server.name))
        for server in run.servers
        for kind in (SERVICE, BUDGET, workload(server))
    }
    for (kind, name), obj in observed.live.items():
        if kind not in KINDS or (kind, name) in kept or not is_of_servers(obj):
            continue
        if owner_of(obj, run, kind) is Owner.OURS and not objects.being_deleted(obj):
            yield kind, obj
