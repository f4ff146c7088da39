"""Tells how a run is: in its status, in Events, and to the operator's metrics."""

import logging
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Protocol

from trainsync.api.failure_policy import FailureClass
from trainsync.api.status import ConditionStatus, ConditionType

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.decide import losses, startup
from trainsync_operator.reconcile.decide.attempts import Decision
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.events import Recorder
from trainsync_operator.reconcile.fencing import as_read
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.plan import Plan
from trainsync_operator.reconcile.reads import Live
from trainsync_operator.reconcile.run import Key, Problem, Run, SpecError, State, parse
from trainsync_operator.reconcile.status_writer import StatusWriter

_LOG = logging.getLogger(__name__)
NO_PROBLEMS: Final[Mapping[str, Problem]] = MappingProxyType({})
# The API server's words for a field of a server-side apply that the CRD lacks.
_NOT_IN_THE_CRD: Final = "field not declared in schema"
_OLD_CRD: Final = (
    "The CRD of TrainingRuns is older than this operator and refuses the run's status: nothing goes"
    " on. Apply crds/trainsync.dev_trainingruns.yaml of the operator's release."
)


class MetricsRecorder(Protocol):
    """Records metrics of each reconcile."""

    def seen(self, run: Run, mine: dict[str, Any]) -> None:
        """Record the run and the operator's part of its status."""

    def attempt_failed(self, key: Key, reason: str, failure_class: FailureClass | None) -> None:
        """Record why an attempt ended, and the class if it failed; the run was `seen` before."""

    def stop_ended(self, key: Key, outcome: StopOutcome) -> None:
        """Record how the wait for a save before pods went ended; the run was `seen` before."""

    def gone(self, key: Key) -> None:
        """Record that the run does not exist any more."""


class Reports:
    """Writes statuses, and the Events and metrics that belong to them.

    Args:
        live: reads and writes at the API server.
    """

    def __init__(self, live: Live, events: Recorder, metrics: MetricsRecorder) -> None:
        self._live = live
        self._events = events
        self._metrics = metrics
        self._writer = StatusWriter(live)

    async def decision(
        self, run: Run, decision: Decision, observed: Observed, now: datetime
    ) -> Object:
        """Write a decision that changes the run's state, and tell of it; the run as it is then."""
        transition = decision.transition
        _LOG.info("%s: %s", transition, decision.message)
        mine = status.build(run, decision.state, observed, now, waiting=decision.message)
        written = await self._writer.write(as_read(run), mine)
        self._metrics.seen(run, mine)
        key = Key(run.namespace, run.name)
        if decision.stop_outcome is not None:
            self._metrics.stop_ended(key, decision.stop_outcome)
        if decision.cause is not None:
            self._metrics.attempt_failed(key, decision.cause, decision.failure_class)
        await self._events.transition(
            run, str(transition), decision.message, now, warning=decision.warning
        )
        return written

    async def state(
        self,
        run: Run,
        state: State,
        observed: Observed,
        now: datetime,
        todo: Plan,
        problem: Problem | None,
        of_servers: Mapping[str, Problem] = NO_PROBLEMS,
    ) -> Object | None:
        """Write the status if it changed; returns the status as it is then, else None.

        Args:
            of_servers: what keeps entries of ``spec.servers`` from being ready, by name.

        Raises:
            StaleError: the run has changed since it was read; so do the other methods.
        """
        mine = status.build(
            run,
            state,
            observed,
            now,
            waiting=todo.waiting,
            problem=problem,
            of_servers=of_servers,
        )
        written = await self._writer.write_changes(run, mine, now)
        self._metrics.seen(run, mine)
        if written and state.outcome is not None:
            seen = run.status.get("observedGeneration")
            if seen is not None and seen != run.generation:
                message = (
                    "The run has finished: of its spec only retentionPolicy and the times after the"
                    " end have an effect still."
                )
                await self._events.transition(run, "SpecIgnored", message, now)
        if written and problem is not None and _is_new(run, problem):
            await self._events.problem(run, problem.reason, problem.message, now)
        for found in of_servers.values():
            if written and _is_new(run, found, ConditionType.SERVERS_READY):
                await self._events.problem(run, found.reason, found.message, now)
                break  # the condition has room for one
        failed = startup.pod_failures(run, state, observed)
        if written and failed and failed != _said_of_pods(run):
            await self._events.problem(run, status.PODS_FAILING, failed, now)
        loss = state.trainer_loss
        if written and loss is not None and "trainerLoss" not in run.status:
            message = losses.told(run, loss)
            await self._events.problem(run, status.TRAINER_POD_LOST, message, now)
        return objects.status(written) if written else None

    async def unable(self, key: Key, message: str, now: datetime) -> None:
        """Say that the operator sees or changes nothing of a run: whether it goes on is unknown.

        Raises:
            ApiError: it was not said.
        """
        raw = await self._live.get(RUN, key.namespace, key.name)
        if raw is not None and not objects.being_deleted(raw):
            problem = Problem("ApiServerFails", f"{message}. The operator tries again.")
            if _NOT_IN_THE_CRD in message:  # of a field that is not in what is written here
                await self._tell_of_an_old_crd(raw, now)
            try:
                await self._write_refused(raw, problem, now, ConditionStatus.UNKNOWN)
            except ApiRefusedError as error:
                if _NOT_IN_THE_CRD in str(error):
                    await self._tell_of_an_old_crd(raw, now)
                raise

    async def _tell_of_an_old_crd(self, raw: Object, now: datetime) -> None:
        """An Event needs no CRD, and a status that the CRD does not take tells nothing."""
        try:
            run = parse(raw)
        except SpecError:
            return
        await self._events.once(run, "CRDOutdated", _OLD_CRD, now)

    async def refuse(self, raw: Object, message: str, now: datetime) -> None:
        """Say in the status why nothing is made of a spec."""
        problem = Problem("InvalidSpec", message)
        await self._write_refused(raw, problem, now, ConditionStatus.FALSE)

    async def hold(self, run: Run, raw: Object, problem: Problem, now: datetime) -> None:
        """Say in the status, and once in an Event, why a run does not begin yet."""
        if await self._write_refused(raw, problem, now, ConditionStatus.FALSE):
            await self._events.problem(run, problem.reason, problem.message, now)

    async def _write_refused(
        self, raw: Object, problem: Problem, now: datetime, truth: ConditionStatus
    ) -> bool:
        """Returns whether that is new."""
        before = objects.status(raw)
        mine = status.refused(before, objects.metadata(raw)["generation"], problem, now, truth)
        new: bool = status.owned(before) != mine
        if new:
            await self._writer.write(raw, mine)
        return new

    def due(self, key: Key) -> list[datetime]:
        """When to look at a run again, whose counts wait to be written."""
        return self._writer.due(key)

    def gone(self, key: Key) -> None:
        """Forget a run."""
        self._writer.gone(key)


def _said_of_pods(run: Run) -> str:
    entries = run.status.get("clusters") or []
    return " ".join(entry["lastPodFailure"] for entry in entries if "lastPodFailure" in entry)


def _is_new(run: Run, problem: Problem, where: str = ConditionType.READY) -> bool:
    before = objects.condition({"status": run.status}, where) or {}
    return (before.get("reason"), before.get("message")) != (problem.reason, problem.message)
