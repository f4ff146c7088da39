"""Makes servers as the spec asks; what the API server refuses of one stops nothing else."""

import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import LEADER_WORKER_SET, POD, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.child import (
    LeftoverError,
    NameTakenError,
    ensure,
    is_calm,
)
from trainsync_operator.reconcile.apply.rejected_requests import AGAIN_SECONDS, RejectedRequests
from trainsync_operator.reconcile.apply.stored_notation import StoredNotation
from trainsync_operator.reconcile.events import Recorder
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.reads import ReadLiveError, Reads
from trainsync_operator.reconcile.run import Problem, Run
from trainsync_operator.reconcile.servers import groups
from trainsync_operator.reconcile.servers.groups import Formed
from trainsync_operator.reconcile.servers.reading import WORKLOADS
from trainsync_operator.reconcile.servers.wanted import ServerChildren, why_missing

_LOG = logging.getLogger(__name__)
# Of a pod that is to go after all that belongs to it, or at once: reason of the Event, and cause.
_WHY_DELETED: Final = {
    True: ("ServerReplaced", "its server has lost a node, and begins anew"),
    False: ("LostPodDeleted", "its node is lost, and nothing ends it"),
}


@dataclass
class Servers:
    """Applies children of servers.

    It remembers what the API server stores in another notation (an empty value, ``1024Mi``), so
    that it is not applied at each look, what the API server has just refused, and which processes
    the servers of several nodes began with.
    """

    events: Recorder
    _stored_notation: StoredNotation = field(default_factory=StoredNotation)
    _rejected: dict[tuple[str, str], RejectedRequests] = field(default_factory=dict)
    _formed: Formed = field(default_factory=Formed)

    async def carry_out(
        self, run: Run, wanted: ServerChildren, observed: Observed, now: datetime, reads: Reads
    ) -> tuple[dict[str, Problem], float | None]:
        """Make it so; returns the problems by entry, and in how many seconds to look again.

        Raises:
            ReadLiveError: there is something to do, and ``reads`` is the store.
            ApiError: the API server was not reached.
        """
        problems = dict(wanted.problems)
        rejected = self._rejected.setdefault((run.namespace, run.name), RejectedRequests())
        for kind, obj in wanted.delete:
            name, uid = objects.name(obj), objects.metadata(obj)["uid"]
            what, server = f"{kind.name} {name}", objects.labels(obj).get(names.LABEL_SERVER, name)
            if (known := rejected.known(what, uid, now)) is not None:
                problems[server] = known
                continue
            there = await reads.get(kind, run.namespace, name)
            if there is None or objects.metadata(there)["uid"] != uid:
                continue
            try:
                await reads.delete(kind, run.namespace, name, uid)
            except ApiRefusedError as error:
                message = f"The API server does not let {what} go: {error}"
                problems[server] = rejected.note(what, uid, Problem("Refused", message), now)
                continue
            _LOG.info("deleted %s", what)
            if kind in WORKLOADS:
                message = f"Servers {server} are no more in the spec as they were: {what} goes."
                await self.events.transition(run, "ServersRemoved", message, now)
        problems |= await self._replace(run, observed, rejected, now, reads)
        of_spec = {server.name: server for server in run.servers}
        for server, children in wanted.ensure.items():
            asked = _asked(run, children)
            if (known := rejected.known(server, asked, now)) is not None:
                problems[server] = known
                continue
            for kind, desired in children:
                try:
                    await self._ensure(run, server, kind, desired, observed, now, reads)
                except (LeftoverError, NameTakenError) as error:
                    if not reads.is_live:
                        raise ReadLiveError(needs_listing=False) from error
                    reason = error.reason if isinstance(error, LeftoverError) else "NameTaken"
                    problems[server] = Problem(reason, str(error))
                    break
                except ApiError as error:
                    problem = _why_refused(of_spec[server], kind, error)
                    problems[server] = rejected.note(server, asked, problem, now)
                    break
        return problems, AGAIN_SECONDS if problems.keys() - wanted.problems.keys() else None

    async def _replace(
        self, run: Run, observed: Observed, rejected: RejectedRequests, now: datetime, reads: Reads
    ) -> dict[str, Problem]:
        """Delete pods on lost nodes, and the first pods of servers that have lost a node, of which
        all pods are made anew.

        Returns:
            The problems by entry.
        """
        problems = {}
        lost = [(*found, False) for found in groups.stranded(run, observed)]
        broken = [(*found, True) for found in self._formed.broken(run, observed)]
        for server, pod, after_all in lost + broken:
            name, uid = objects.name(pod), objects.metadata(pod)["uid"]
            what = f"Pod {name}"
            if (known := rejected.known(what, uid, now)) is not None:
                problems[server.name] = known
                continue
            try:
                await reads.delete(POD, run.namespace, name, uid, after_all=after_all)
            except ApiRefusedError as error:
                message = f"The API server does not let {what} go: {error}"
                problem = rejected.note(what, uid, Problem("Refused", message), now)
                problems[server.name] = problem
                continue
            reason, why = _WHY_DELETED[after_all]
            _LOG.info("deleted %s: %s", what, why)
            await self.events.transition(run, reason, f"{what} was deleted: {why}.", now)
        return problems

    async def _ensure(
        self,
        run: Run,
        server: str,
        kind: Kind,
        desired: Object,
        observed: Observed,
        now: datetime,
        reads: Reads,
    ) -> None:
        name = objects.name(desired)
        live = observed.live.get((kind, name))
        changed = live is not None and self._stored_notation.differs(run, kind, live, desired)
        if reads.is_live and (live is None or changed or not is_calm(live, run, kind)):
            # The store is older, or has it not: it may have no label, or another owner.
            known, live = live, await reads.get(kind, run.namespace, name)
            if known is None and live is not None and kind in WORKLOADS and not reads.lists_live:
                # How many servers are asked for is kept of what is there, which was not known.
                raise ReadLiveError(needs_listing=True)
            changed = live is not None and self._stored_notation.differs(run, kind, live, desired)
        applied = await ensure(reads, kind, desired, live, run, changed=changed)
        if applied is None:
            if changed and live is not None:
                self._stored_notation.note(run, kind, live, desired)
            return
        _LOG.info("%s %s %s", "made" if live is None else "put right", kind.name, name)
        if kind in WORKLOADS and live is None:
            message = f"{kind.name} {name} was made for servers {server}."
            await self.events.transition(run, "ServersCreated", message, now)

    def gone(self, namespace: str, run: str) -> None:
        """Forget a run."""
        self._stored_notation.gone(namespace, run)
        self._rejected.pop((namespace, run), None)
        self._formed.gone(namespace, run)


def _why_refused(server: Server, kind: Kind, error: ApiError) -> Problem:
    """Why a child is not made.

    Raises:
        ApiError: ``error``, if the API server was not reached, or cannot answer now.
    """
    of_group, problem = kind is LEADER_WORKER_SET, None
    if isinstance(error, ApiRefusedError):
        problem = why_missing(server, error) if of_group else None
    elif not of_group or "webhook" not in str(error):
        raise error  # nothing else of the run waits until the webhook of LWS answers
    return problem or Problem("Refused", f"The API server refuses a child: {error}")


def _asked(run: Run, children: list[tuple[Kind, Object]]) -> str:
    hashes = [objects.metadata(obj)["annotations"][names.ANNOTATION_HASH] for _, obj in children]
    return " ".join([run.uid, *hashes])
