"""Carries out a plan: what has to go is deleted, what is missing or differs is applied."""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from trainsync.api import names

from trainsync_operator.builders import queue
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import DEPLOYMENT, POD, RAY_CLUSTER, RAY_JOB
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.child import differs, ensure, is_calm
from trainsync_operator.reconcile.apply.monitor_rollouts import MonitorRollouts
from trainsync_operator.reconcile.apply.stored_notation import StoredNotation
from trainsync_operator.reconcile.events import Recorder
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.plan import Plan, plan
from trainsync_operator.reconcile.reads import Reads
from trainsync_operator.reconcile.run import Key, Run, State

_LOG = logging.getLogger(__name__)


class Children:
    """Applies the children of runs, but for those of servers.

    It remembers what the API server stores in another notation, and whose monitors are being
    replaced.

    Args:
        wake: asks for a look at a run, whose turn to replace its monitor has come.
    """

    def __init__(
        self, events: Recorder, monitor: MonitorSettings, wake: Callable[[Key], None]
    ) -> None:
        self._events = events
        self._monitor = monitor
        self._rollouts = MonitorRollouts(wake)
        self._stored_notation = StoredNotation()

    async def carry_out(
        self, run: Run, state: State, todo: Plan, observed: Observed, now: datetime, reads: Reads
    ) -> float | None:
        """Carry out the plan; returns the seconds until what has to wait is tried again.

        Raises:
            ReadLiveError: there is something to do, and ``reads`` is the store.
            LeftoverError, NameTakenError: a child's name is not free.
            ApiRefusedError: a change was refused; that of a lost pod's deletion only when all else
                is done.
        """
        refused: ApiRefusedError | None = None
        for doomed in todo.delete:
            try:
                await reads.delete(doomed.kind, run.namespace, doomed.name, doomed.uid)
            except ApiRefusedError as error:
                if doomed.kind is not POD:
                    raise
                refused = error  # by roles of before it was asked for: the run goes on without
                continue
            _LOG.info("deleted %s %s", doomed.kind.name, doomed.name)
            if doomed.kind is POD:
                message = f"Pod {doomed.name} was deleted: its node is lost, and nothing ends it."
                await self._events.transition(run, "LostPodDeleted", message, now)
        soon = await self._ensure(run, state, todo, observed, now, reads)
        if refused is not None:
            raise refused
        return soon

    async def _ensure(
        self, run: Run, state: State, todo: Plan, observed: Observed, now: datetime, reads: Reads
    ) -> float | None:
        """Make and put right the children; returns as `carry_out`."""
        made_cluster = False
        key, rolls = Key(run.namespace, run.name), False
        for kind, desired in todo.ensure:
            if made_cluster and kind is not RAY_CLUSTER and not reads.lists_live:
                return 0.0  # of many new runs, all RayClusters come before the first monitor
            name = objects.name(desired)
            live = observed.live.get((kind, name))
            if live is None and reads.is_live:
                # It may have no label, or another owner.
                live = await reads.get(kind, run.namespace, name)
            changed = live is not None and self._stored_notation.differs(run, kind, live, desired)
            if live is not None and reads.is_live and (changed or not is_calm(live, run, kind)):
                # It may have come from the store.
                seen, live = live, await reads.get(kind, run.namespace, name)
                if live is None or objects.metadata(live)["uid"] != objects.metadata(seen)["uid"]:
                    return 0.0  # it is another object, or none: decide anew
                changed = self._stored_notation.differs(run, kind, live, desired)
            if kind is DEPLOYMENT:
                rolls = changed or not observed.monitor_ready
                if changed and not self._rollouts.may(key, now):
                    continue
            applied = await ensure(reads, kind, desired, live, run, changed=changed)
            if applied is None:
                if changed and live is not None:
                    self._stored_notation.note(run, kind, live, desired)
                continue
            _LOG.info("%s %s %s", "made" if live is None else "put right", kind.name, name)
            if kind is RAY_CLUSTER and live is None:
                made_cluster = True
                await self._put_into_queue(run, state, observed, now, reads, applied)
            if kind is RAY_JOB and live is None:
                attempt = objects.labels(desired)[names.LABEL_ATTEMPT]
                message = f"RayJob {name} was made for attempt {attempt}."
                await self._events.transition(run, "JobCreated", message, now)
        if not rolls:
            self._rollouts.done(key, now)
        return None

    async def _put_into_queue(
        self,
        run: Run,
        state: State,
        observed: Observed,
        now: datetime,
        reads: Reads,
        made: Object,
    ) -> None:
        """Rebuild a new RayCluster at once if Kueue manages it although the run has no queue.

        Pods of an admitted cluster cannot be changed. A cluster that was written to meanwhile stays
        as it is.
        """
        if run.queue_name is not None or not queue.manages(made):
            return
        child = (RAY_CLUSTER, objects.name(made))
        seen = replace(observed, live={**observed.live, child: made})
        built = plan(run, state, seen, now, self._monitor).ensure
        desired = next(obj for kind, obj in built if (kind, objects.name(obj)) == child)
        if not differs(made, desired):
            return
        desired["metadata"]["resourceVersion"] = objects.metadata(made)["resourceVersion"]
        try:
            await reads.apply(RAY_CLUSTER, desired)
        except ApiRefusedError as error:
            if error.status not in (404, 409):
                raise

    def due(self, key: Key, now: datetime) -> list[datetime]:
        """When to look at a run again, whose monitor is being replaced."""
        return self._rollouts.due(key, now)

    def gone(self, key: Key, now: datetime) -> None:
        """Forget a run."""
        self._stored_notation.gone(key.namespace, key.name)
        self._rollouts.done(key, now)
