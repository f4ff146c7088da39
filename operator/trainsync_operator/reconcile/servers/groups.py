"""Servers of several nodes, from their pods: which are ready, and which have lost a node.

The processes of one engine begin together: one that ended and began again cannot join the others,
which may wait for it for ever. Agents may begin again at any time. While no operator leads, vLLM
notices a lost node at the next request, and the probe of the first node restarts that server.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers.hosts import LABEL_GROUP, LABEL_RANK, LEADING
from trainsync_operator.kube import objects
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.observed import Observed, read_pod
from trainsync_operator.reconcile.run import Run

Engines = frozenset[tuple[str, str]]
"""The processes of one server: of each its pod's uid, and when it began."""


@dataclass(frozen=True)
class Group:
    """The pods of one server: the first, which answers requests, and the others that are there."""

    leader: Object
    workers: tuple[Object, ...]


def of(server: Server, observed: Observed) -> Iterator[Group]:
    """The servers of an entry whose first pod is there, and stays."""
    pods = [
        pod
        for pod in observed.server_pods
        if objects.labels(pod).get(names.LABEL_SERVER) == server.name
        and not objects.being_deleted(pod)
    ]
    for leader in pods:
        if objects.labels(leader).get(LABEL_RANK) == LEADING:
            number = objects.labels(leader).get(LABEL_GROUP)
            alike = (pod for pod in pods if objects.labels(pod).get(LABEL_GROUP) == number)
            yield Group(leader, tuple(pod for pod in alike if pod is not leader))


def stranded(run: Run, observed: Observed) -> Iterator[tuple[Server, Object]]:
    """Pods on lost nodes: nothing ends them, and no other is made in their place before."""
    large = {server.name: server for server in run.servers if server.nodes > 1}
    for pod in observed.server_pods:
        server = large.get(objects.labels(pod).get(names.LABEL_SERVER, ""))
        if server is not None and read_pod(pod).stranded:
            yield server, pod


def ready(server: Server, observed: Observed) -> int:
    """How many servers are ready."""
    return sum(1 for group in of(server, observed) if _is_ready(group.leader))


def of_template(server: Server, observed: Observed, mark: str | None) -> int:
    """How many servers were made from the templates with a hash."""
    return sum(1 for group in of(server, observed) if _mark(group.leader) == mark)


def renewed(server: Server, observed: Observed, mark: str | None) -> int:
    """How many are both."""
    found = of(server, observed)
    return sum(1 for group in found if _is_ready(group.leader) and _mark(group.leader) == mark)


def _is_ready(pod: Object) -> bool:
    return objects.condition_is_true(pod, "Ready")


def _mark(pod: Object) -> str | None:
    return objects.labels(pod).get(names.LABEL_TEMPLATE)


def _engine(pod: Object) -> dict[str, Any]:
    """The status of the container of the server, empty where it has none yet."""
    name = pod["spec"]["containers"][0].get("name")
    known = objects.status(pod).get("containerStatuses") or []
    return next((entry for entry in known if entry.get("name") == name), {})


def _engines(group: Group) -> Engines:
    began = (
        (pod, ((_engine(pod).get("state") or {}).get("running") or {}).get("startedAt"))
        for pod in (group.leader, *group.workers)
    )
    return frozenset((str(objects.metadata(pod)["uid"]), str(at)) for pod, at in began if at)


def _untold(group: Group, before: Engines) -> Engines:
    """Those of ``before`` of which the status of a running pod says nothing: they may go on."""
    silent = {
        str(objects.metadata(pod)["uid"])
        for pod in (group.leader, *group.workers)
        if objects.status(pod).get("phase") == "Running" and not _engine(pod)
    }
    return frozenset(process for process in before if process[0] in silent)


@dataclass
class Formed:
    """The servers that have begun with all of their nodes, by the uid of their first pod.

    After a restart of the operator those are known that are whole then. One that lost a node just
    before is found when its engine fails, and is restarted by its own probe.
    """

    _known: dict[tuple[str, str], dict[str, Engines]] = field(default_factory=dict)

    def broken(self, run: Run, observed: Observed) -> list[tuple[Server, Object]]:
        """The first pods of servers of which a process is another one than when they began."""
        before, now, found = self._known.get((run.namespace, run.name), {}), {}, []
        for server in run.servers:
            for group in of(server, observed) if server.nodes > 1 else ():
                uid, engines = str(objects.metadata(group.leader)["uid"]), _engines(group)
                if uid in before:
                    now[uid] = before[uid]
                    if engines | _untold(group, before[uid]) != before[uid]:
                        found.append((server, group.leader))
                elif len(engines) == server.nodes and _engine(group.leader).get("started"):
                    now[uid] = engines
        self._known[run.namespace, run.name] = now
        return found

    def gone(self, namespace: str, run: str) -> None:
        """Forget a run."""
        self._known.pop((namespace, run), None)
