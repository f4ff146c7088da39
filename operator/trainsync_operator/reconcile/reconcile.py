"""One reconcile of one run: observe, decide, build, apply, status."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from trainsync.api import names

from trainsync_operator.builders.target import MonitorImage
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api, ApiRefusedError
from trainsync_operator.kube.kinds import RAY_CLUSTER, RAY_JOB, RUN
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import attempts, events, status
from trainsync_operator.reconcile.apply import LeftoverError, NameTakenError, ensure
from trainsync_operator.reconcile.attempts import Decision
from trainsync_operator.reconcile.observe import observe
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.plan import Plan, plan
from trainsync_operator.reconcile.run import Run, SpecError, State, parse, remembered
from trainsync_operator.reconcile.status import Problem

_LOG = logging.getLogger(__name__)
# Seconds until the next reconcile where no watch event will come.
_POLL_SECONDS: Final = 5.0
_LEFTOVER_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 0.1


class _StaleError(Exception):
    """The run has changed or was replaced since it was read."""


@dataclass(frozen=True)
class Key:
    """Names a run."""

    namespace: str
    name: str


class Watcher(Protocol):
    """Records metrics of each reconcile."""

    def seen(self, run: Run, mine: dict[str, Any]) -> None:
        """Record the run and the operator's part of its status."""

    def attempt_failed(self, key: Key, reason: str) -> None:
        """Record the cause for which an attempt ended; the run was `seen` before."""

    def gone(self, key: Key) -> None:
        """Record that the run does not exist any more."""


def utc_now() -> datetime:
    """The present time in whole seconds, the resolution of times in Kubernetes."""
    return datetime.now(UTC).replace(microsecond=0)


@dataclass
class Reconciler:
    """Observes, decides and applies; has no state between two calls."""

    api: Api
    watcher: Watcher
    monitor_image: MonitorImage
    clock: Callable[[], datetime] = utc_now

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile a run; returns the seconds until the next reconcile.

        Raises:
            ApiError: try again.
        """
        try:
            return await self._reconcile(key)
        except _StaleError:
            return _STALE_SECONDS

    async def _reconcile(self, key: Key) -> float | None:
        raw = await self.api.get(RUN, key.namespace, key.name)
        if raw is None:
            self.watcher.gone(key)
            return None
        if objects.being_deleted(raw):
            return None  # the garbage collector takes the children
        now = self.clock()
        try:
            run = parse(raw)
        except SpecError as error:
            await self._refuse(raw, str(error), now)
            return None

        observed = await observe(self.api, run)
        decision = attempts.decide(run, remembered(run.status), observed, now)
        if decision.transition is not None:
            # The new state must be in the status before any child is made for it.
            await self._remember(run, decision, observed, now)
            return 0.0
        return await self._carry_out(run, decision, observed, now)

    async def _refuse(self, raw: Object, message: str, now: datetime) -> None:
        meta = objects.metadata(raw)
        before = objects.status(raw)
        problem = Problem("InvalidSpec", message)
        mine = status.refused(before, meta["generation"], problem, now)
        if status.owned(before) != mine:
            await self._write_status(meta, mine)

    async def _remember(
        self, run: Run, decision: Decision, observed: Observed, now: datetime
    ) -> None:
        transition = decision.transition
        _LOG.info("%s: %s", transition, decision.message)
        mine = status.build(run, decision.state, observed, now, waiting=decision.message)
        await self._write_status_of(run, mine)
        self.watcher.seen(run, mine)
        if decision.cause is not None:
            self.watcher.attempt_failed(Key(run.namespace, run.name), decision.cause)
        await self._tell(run, str(transition), decision.message, now, warning=decision.warning)

    async def _carry_out(
        self, run: Run, decision: Decision, observed: Observed, now: datetime
    ) -> float | None:
        state, problem, again = decision.state, None, list(decision.due)
        todo = Plan()
        soon: float | None = None
        try:
            todo = plan(run, state, observed, now, self.monitor_image)
            again += todo.due
            await self._apply(run, todo, observed, now)
        except LeftoverError as error:
            problem, soon = Problem("Deleting", str(error)), _LEFTOVER_SECONDS
        except NameTakenError as error:
            problem, soon = Problem("NameTaken", str(error)), _POLL_SECONDS
        except SpecError as error:
            problem = Problem("InvalidSpec", str(error))
        except ApiRefusedError as error:
            # Write the problem into the status, then retry with back-off.
            problem = Problem("Refused", f"The API server refuses a child: {error}")
            await self._report(run, state, observed, now, todo, problem)
            raise
        phase = await self._report(run, state, observed, now, todo, problem)
        waits = [(moment - now).total_seconds() for moment in again]
        if soon is not None:
            waits.append(soon)
        if phase in ("Starting", "Restarting"):
            waits.append(_POLL_SECONDS)
        return min(waits, default=None)

    async def _apply(self, run: Run, todo: Plan, observed: Observed, now: datetime) -> None:
        for doomed in todo.delete:
            _LOG.info("deleting %s %s", doomed.kind.name, doomed.name)
            await self.api.delete(doomed.kind, run.namespace, doomed.name, doomed.uid)
        for kind, desired in todo.ensure:
            name = objects.name(desired)
            live = observed.live.get((kind, name))
            if live is None and kind in (RAY_CLUSTER, RAY_JOB):
                # A child whose label was removed is missing in the list by label.
                live = await self.api.get(kind, run.namespace, name)
            applied = await ensure(self.api, kind, desired, live, run.uid)
            if applied is None:
                continue
            _LOG.info("%s %s %s", "made" if live is None else "put right", kind.name, name)
            if kind is RAY_JOB and live is None:
                attempt = objects.labels(desired)[names.LABEL_ATTEMPT]
                message = f"RayJob {name} was made for attempt {attempt}."
                await self._tell(run, "JobCreated", message, now)

    async def _report(
        self,
        run: Run,
        state: State,
        observed: Observed,
        now: datetime,
        todo: Plan,
        problem: Problem | None,
    ) -> str:
        mine = status.build(run, state, observed, now, waiting=todo.waiting, problem=problem)
        written = await self._write_status_of(run, mine)
        self.watcher.seen(run, mine)
        if written and state.outcome is not None:
            seen = run.status.get("observedGeneration")
            if seen is not None and seen != run.generation:
                message = "The run has finished: changes to its spec have no effect on it."
                await self._tell(run, "SpecIgnored", message, now)
        if written and problem is not None and self._is_new(run, problem):
            await self._tell(run, problem.reason, problem.message, now, warning=True)
        return str(mine["phase"])

    @staticmethod
    def _is_new(run: Run, problem: Problem) -> bool:
        before = objects.condition({"status": run.status}, "Ready") or {}
        return (before.get("reason"), before.get("message")) != (problem.reason, problem.message)

    async def _write_status_of(self, run: Run, mine: dict[str, Any]) -> bool:
        if status.owned(run.status) == mine:
            return False
        meta = {
            "name": run.name,
            "namespace": run.namespace,
            "resourceVersion": run.resource_version,
        }
        await self._write_status(meta, mine)
        return True

    async def _write_status(self, meta: dict[str, Any], mine: dict[str, Any]) -> None:
        """Write the status, unless the run was changed or replaced since it was read.

        A check of the uid would not work: server-side apply of a status ignores the uid.
        """
        kept = {key: meta[key] for key in ("name", "namespace", "resourceVersion")}
        obj = {
            "apiVersion": RUN.api_version,
            "kind": RUN.name,
            "metadata": kept,
            "status": mine,
        }
        try:
            await self.api.apply_status(RUN, obj)
        except ApiRefusedError as error:
            if error.status in (404, 409):
                raise _StaleError from error
            raise

    async def _tell(
        self, run: Run, reason: str, message: str, now: datetime, *, warning: bool = False
    ) -> None:
        await events.post(self.api, run, reason, message, now, warning=warning)
