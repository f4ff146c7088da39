"""One reconcile of one run: observe, decide, build, apply, status."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol

from trainsync.api import names
from trainsync.api.failure_policy import FailureClass
from trainsync.api.status import ConditionStatus, ConditionType

from trainsync_operator.builders import queue
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api, ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import DEPLOYMENT, POD, RAY_CLUSTER, RAY_JOB, RUN
from trainsync_operator.kube.logging import of_attempt
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.apply import (
    LeftoverError,
    NameTakenError,
    differs,
    ensure,
    is_calm,
)
from trainsync_operator.reconcile.decide import attempts, startup
from trainsync_operator.reconcile.decide.attempts import Decision, Transition
from trainsync_operator.reconcile.decide.failures import OF_THE_USER
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.dry_run import REFUSED, DryRuns
from trainsync_operator.reconcile.events import Recorder
from trainsync_operator.reconcile.fencing import as_read, of_monitor, same
from trainsync_operator.reconcile.monitor_rollouts import MonitorRollouts
from trainsync_operator.reconcile.observe import observe
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.pace import Pace
from trainsync_operator.reconcile.plan import Plan, plan
from trainsync_operator.reconcile.reads import Cached, Confirmed, Live, ReadLiveError, Reads
from trainsync_operator.reconcile.refusals import AGAIN_SECONDS
from trainsync_operator.reconcile.run import Problem, Run, SpecError, State, parse, remembered
from trainsync_operator.reconcile.servers.carry_out import Servers
from trainsync_operator.reconcile.stored_notation import StoredNotation

_LOG = logging.getLogger(__name__)
# Of what no watch tells.
_POLL_SECONDS: Final = 5.0
# An object that is being deleted is looked at after half the time that it has taken so far.
_LEFTOVER_SECONDS: Final = 1.0
_LAST_LEFTOVER_SECONDS: Final = 120.0
# The monitor writes its part of the status every two seconds, between our read and our write.
_STATUS_TRIES: Final = 4
_NO_PROBLEMS: Final[Mapping[str, Problem]] = MappingProxyType({})
# The API server's words for a field of a server-side apply that the CRD lacks.
_NOT_IN_THE_CRD: Final = "field not declared in schema"
_OLD_CRD: Final = (
    "The CRD of TrainingRuns is older than this operator and refuses the run's status: nothing goes"
    " on. Apply crds/trainsync.dev_trainingruns.yaml of the operator's release."
)


class StaleError(ApiError):
    """The run has changed, or is another one, since it was read; decide again, with back-off."""

    already_reported = True  # nothing is wrong


@dataclass(frozen=True)
class Key:
    """Names a run."""

    namespace: str
    name: str


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


def _said_of_pods(run: Run) -> str:
    entries = run.status.get("clusters") or []
    return " ".join(entry["lastPodFailure"] for entry in entries if "lastPodFailure" in entry)


def _leftover_wait(error: LeftoverError, now: datetime) -> float:
    late = (now - error.since).total_seconds() if error.since else 0.0
    return min(max(late / 2, _LEFTOVER_SECONDS), _LAST_LEFTOVER_SECONDS)


def _begins_anew(run: Run, decision: Decision, observed: Observed) -> bool:
    """Whether a run begins of which nothing was ever made: the store is enough for that.

    Where a status was wiped, the children tell the attempt, and a watch may be late with a job.
    """
    known = observed.live or observed.pods or run.status.get("phase")
    return decision.transition is Transition.BEGIN and not known


def _ignored(run: Run) -> str:
    fields = ", ".join(run.ignored)
    return f"This operator is older than the CRD, does not know and ignores: {fields}. Upgrade it."


def utc_now() -> datetime:
    """The present time in whole seconds, the resolution of times in Kubernetes."""
    return datetime.now(UTC).replace(microsecond=0)


@dataclass
class Reconciler:
    """Carries out decisions; between two calls it remembers what its fields name.

    Args:
        store: what the watches have seen; nothing is read from it until it is synced.
        wake: asks for a look at a run, whose turn to replace its monitor has come.
    """

    api: Api
    metrics: MetricsRecorder
    monitor: MonitorSettings
    clock: Callable[[], datetime] = utc_now
    store: Store = field(default_factory=Store)
    wake: Callable[[Key], None] = lambda _: None
    events: Recorder = field(init=False)
    rollouts: MonitorRollouts[Key] = field(init=False)
    stored_notation: StoredNotation = field(init=False, default_factory=StoredNotation)
    pace: Pace[Key] = field(init=False, default_factory=Pace)
    servers: Servers = field(init=False)
    dry_runs: DryRuns = field(init=False, default_factory=DryRuns)
    live: Live = field(init=False)
    confirmed: Confirmed = field(init=False)

    def __post_init__(self) -> None:
        """Events go through the same client."""
        self.events = Recorder(self.api)
        self.rollouts = MonitorRollouts(self.wake)
        self.servers = Servers(self.events)
        self.live = Live(self.api, self.store)
        self.confirmed = Confirmed(self.api, self.store)

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile a run; returns the seconds until the next reconcile.

        Raises:
            ApiError: try again, with back-off.
        """
        if self.store.synced:
            with contextlib.suppress(ReadLiveError):
                return await self._with_store(key)
        return await self._reconcile(key, self.live)

    async def _with_store(self, key: Key) -> float | None:
        try:
            return await self._reconcile(key, Cached(self.store))
        except ReadLiveError as error:
            if error.needs_listing:
                raise
        return await self._reconcile(key, self.confirmed)

    async def _reconcile(self, key: Key, reads: Reads) -> float | None:
        raw = await reads.get(RUN, key.namespace, key.name)
        if raw is None:
            if not reads.is_live:
                raise ReadLiveError(needs_listing=False)
            self.metrics.gone(key)
            self._forget(key)
            return None
        if objects.being_deleted(raw):
            self._forget(key)
            return None  # the garbage collector takes the children
        now = self.clock()
        try:
            run = parse(raw)
        except SpecError as error:
            await self._refuse(raw, str(error), now)
            return None

        if run.spec.managed_by not in (None, names.MANAGER):
            self.metrics.gone(key)
            return None
        if run.ignored:
            await self.events.once(run, "FieldsIgnored", _ignored(run), now)
        observed = await observe(reads, run, self.monitor)
        of_attempt(remembered(run.status).attempt)
        decision, held = await self._decide(run, observed, now, reads)
        if decision.transition is not None:
            if not reads.lists_live and not _begins_anew(run, decision, observed):
                raise ReadLiveError(needs_listing=True)
            reads = reads if reads.is_live else self.confirmed
            # The new state must be in the status before any child is made for it.
            run = parse(await self._remember(run, decision, observed, now))
            decision, held = await self._decide(run, observed, now, reads)
            of_attempt(decision.state.attempt)
            if decision.transition is not None:
                return 0.0
        return await self._carry_out(run, decision, observed, now, reads, held)

    async def _decide(
        self, run: Run, observed: Observed, now: datetime, reads: Reads
    ) -> tuple[Decision, Problem | None]:
        """Decide what happens next, and why an edit waits if its children cannot be made."""
        state = remembered(run.status)
        decision = attempts.decide(run, state, observed, now)
        if decision.cause not in OF_THE_USER:
            return decision, None
        todo = plan(run, decision.state, observed, now, self.monitor)
        held = await self.dry_runs.problem(run, todo, observed, now, reads)
        if held is None:
            return decision, None
        return attempts.decide(run, state, observed, now, edits=False), held

    def _forget(self, key: Key) -> None:
        self.events.gone(key.namespace, key.name)
        self.servers.gone(key.namespace, key.name)
        self.dry_runs.gone(key.namespace, key.name)
        self.stored_notation.gone(key.namespace, key.name)
        self.rollouts.done(key, self.clock())
        self.pace.gone(key)

    async def unable(self, key: Key, message: str) -> None:
        """Say that the operator sees or changes nothing of a run: whether it goes on is unknown.

        Raises:
            ApiError: it was not said.
        """
        raw = await self.live.get(RUN, key.namespace, key.name)
        if raw is not None and not objects.being_deleted(raw):
            problem = Problem("ApiServerFails", f"{message}. The operator tries again.")
            now = self.clock()
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
        await self.events.once(run, "CRDOutdated", _OLD_CRD, now)

    async def _refuse(self, raw: Object, message: str, now: datetime) -> None:
        problem = Problem("InvalidSpec", message)
        await self._write_refused(raw, problem, now, ConditionStatus.FALSE)

    async def _write_refused(
        self, raw: Object, problem: Problem, now: datetime, truth: ConditionStatus
    ) -> None:
        before = objects.status(raw)
        mine = status.refused(before, objects.metadata(raw)["generation"], problem, now, truth)
        if status.owned(before) != mine:
            await self._write_status(raw, mine)

    async def _remember(
        self, run: Run, decision: Decision, observed: Observed, now: datetime
    ) -> Object:
        """Write the decision; returns the run as it is now."""
        transition = decision.transition
        _LOG.info("%s: %s", transition, decision.message)
        mine = status.build(run, decision.state, observed, now, waiting=decision.message)
        written = await self._write_status(as_read(run), mine)
        self.metrics.seen(run, mine)
        key = Key(run.namespace, run.name)
        if decision.stop_outcome is not None:
            self.metrics.stop_ended(key, decision.stop_outcome)
        if decision.cause is not None:
            self.metrics.attempt_failed(key, decision.cause, decision.failure_class)
        await self.events.transition(
            run, str(transition), decision.message, now, warning=decision.warning
        )
        return written

    async def _carry_out(
        self,
        run: Run,
        decision: Decision,
        observed: Observed,
        now: datetime,
        reads: Reads,
        held: Problem | None,
    ) -> float | None:
        state = decision.state
        todo = plan(run, state, observed, now, self.monitor, held)
        problem, again, of_servers = todo.problem, decision.due + tuple(todo.due), _NO_PROBLEMS
        soon: float | None = None
        try:
            # Servers first: a refused child of the rest must not keep a suspended run's servers.
            carried = await self.servers.carry_out(run, todo.servers, observed, now, reads)
            of_servers, later = carried
            again += () if later is None else (now + timedelta(seconds=later),)
            soon = await self._apply(run, state, todo, observed, now, reads)
        except (LeftoverError, NameTakenError) as error:
            if not reads.is_live:
                raise ReadLiveError(needs_listing=False) from error
            if isinstance(error, LeftoverError):
                problem, soon = Problem(error.reason, str(error)), _leftover_wait(error, now)
            else:
                problem, soon = Problem("NameTaken", str(error)), _POLL_SECONDS
        except ApiRefusedError as error:
            # Write the problem into the status, then retry with back-off.
            problem = Problem("Refused", f"The API server refuses a child: {error}")
            await self._report(run, state, observed, now, todo, problem)
            error.already_reported = True
            if any(job.phase is JobPhase.RUNNING for job in observed.jobs_of(state.attempt)):
                error.at_most = AGAIN_SECONDS  # a lost pod and a save are to be seen meanwhile
            raise
        if soon == 0.0:
            return soon  # the next look reports
        written = await self._report(run, state, observed, now, todo, problem, of_servers)
        key = Key(run.namespace, run.name)
        again += (*self.rollouts.due(key, now), *self.pace.due(key))
        waits = [(moment - now).total_seconds() for moment in again]
        if held is not None and held.reason == REFUSED:
            waits.append(AGAIN_SECONDS)
        if written is not None and of_monitor(written) != of_monitor(run.status):
            waits.append(0.0)  # decided without it, and no watch tells what is in the store already
        if soon is not None:
            waits.append(soon)
        return min(waits, default=None)

    async def _apply(
        self, run: Run, state: State, todo: Plan, observed: Observed, now: datetime, reads: Reads
    ) -> float | None:
        """Carry out the plan; returns the seconds until what has to wait is tried again.

        Raises:
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
                await self.events.transition(run, "LostPodDeleted", message, now)
        soon = await self._ensure(run, state, todo, observed, now, reads)
        if refused is not None:
            raise refused
        return soon

    async def _ensure(
        self, run: Run, state: State, todo: Plan, observed: Observed, now: datetime, reads: Reads
    ) -> float | None:
        """Make and put right the children; returns as `_apply`."""
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
            changed = live is not None and self.stored_notation.differs(run, kind, live, desired)
            if live is not None and reads.is_live and (changed or not is_calm(live, run, kind)):
                # It may have come from the store.
                seen, live = live, await reads.get(kind, run.namespace, name)
                if live is None or objects.metadata(live)["uid"] != objects.metadata(seen)["uid"]:
                    return 0.0  # it is another object, or none: decide anew
                changed = self.stored_notation.differs(run, kind, live, desired)
            if kind is DEPLOYMENT:
                rolls = changed or not observed.monitor_ready
                if changed and not self.rollouts.may(key, now):
                    continue
            applied = await ensure(reads, kind, desired, live, run, changed=changed)
            if applied is None:
                if changed and live is not None:
                    self.stored_notation.note(run, kind, live, desired)
                continue
            _LOG.info("%s %s %s", "made" if live is None else "put right", kind.name, name)
            if kind is RAY_CLUSTER and live is None:
                made_cluster = True
                await self._put_into_queue(run, state, observed, now, reads, applied)
            if kind is RAY_JOB and live is None:
                attempt = objects.labels(desired)[names.LABEL_ATTEMPT]
                message = f"RayJob {name} was made for attempt {attempt}."
                await self.events.transition(run, "JobCreated", message, now)
        if not rolls:
            self.rollouts.done(key, now)
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
        """Build a new RayCluster anew at once if Kueue has taken it though the run has no queue.

        Once it is admitted, its pods do not change. A write between the two leaves it as it is.
        """
        if run.queue_name is not None or not queue.manages(made):
            return
        child = (RAY_CLUSTER, objects.name(made))
        seen = replace(observed, live={**observed.live, child: made})
        built = plan(run, state, seen, now, self.monitor).ensure
        desired = next(obj for kind, obj in built if (kind, objects.name(obj)) == child)
        if not differs(made, desired):
            return
        desired["metadata"]["resourceVersion"] = objects.metadata(made)["resourceVersion"]
        try:
            await reads.apply(RAY_CLUSTER, desired)
        except ApiRefusedError as error:
            if error.status not in (404, 409):
                raise

    async def _report(
        self,
        run: Run,
        state: State,
        observed: Observed,
        now: datetime,
        todo: Plan,
        problem: Problem | None,
        of_servers: Mapping[str, Problem] = _NO_PROBLEMS,
    ) -> Object | None:
        """Write the status if it changed; returns the status as it is then."""
        mine = status.build(
            run,
            state,
            observed,
            now,
            waiting=todo.waiting,
            problem=problem,
            of_servers=of_servers,
        )
        written = await self._write_status_of(run, mine, now)
        self.metrics.seen(run, mine)
        if written and state.outcome is not None:
            seen = run.status.get("observedGeneration")
            if seen is not None and seen != run.generation:
                message = (
                    "The run has finished: of its spec only retentionPolicy and the times after the"
                    " end have an effect still."
                )
                await self.events.transition(run, "SpecIgnored", message, now)
        if written and problem is not None and self._is_new(run, problem):
            await self.events.problem(run, problem.reason, problem.message, now)
        for found in of_servers.values():
            if written and self._is_new(run, found, ConditionType.SERVERS_READY):
                await self.events.problem(run, found.reason, found.message, now)
                break  # the condition has room for one
        failed = startup.pod_failures(run, state, observed)
        if written and failed and failed != _said_of_pods(run):
            await self.events.problem(run, status.PODS_FAILING, failed, now)
        return objects.status(written) if written else None

    @staticmethod
    def _is_new(run: Run, problem: Problem, where: str = ConditionType.READY) -> bool:
        before = objects.condition({"status": run.status}, where) or {}
        return (before.get("reason"), before.get("message")) != (problem.reason, problem.message)

    async def _write_status_of(
        self, run: Run, mine: dict[str, Any], now: datetime
    ) -> Object | None:
        key, before = Key(run.namespace, run.name), status.owned(run.status)
        if self.pace.waits(key, before, mine, now) or before == mine:
            return None
        written = await self._write_status(as_read(run), mine)
        self.pace.wrote(key, now)
        return written

    async def _write_status(self, raw: Object, mine: dict[str, Any]) -> Object:
        """Write to the very run that was read; a namesake, or one that moved on, is left alone.

        The resourceVersion fences, as server-side apply of a status does not look at the uid. When
        only the monitor has written meanwhile, what was decided still holds and is written.
        """
        live: Object | None = raw
        for _ in range(_STATUS_TRIES):
            if live is None or not same(live, raw):
                break
            meta = objects.metadata(live)
            kept = {key: meta[key] for key in ("name", "namespace", "resourceVersion")}
            obj = {
                "apiVersion": RUN.api_version,
                "kind": RUN.name,
                "metadata": kept,
                "status": mine,
            }
            try:
                return await self.live.apply_status(RUN, obj)
            except ApiRefusedError as error:
                if error.status not in (404, 409):
                    raise
                live = await self.live.get(RUN, kept["namespace"], kept["name"])
        raise StaleError("the run has changed since it was read")
