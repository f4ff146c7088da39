"""One reconcile of one run: observe, decide, plan, apply, status."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from trainsync.api import names

from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api, ApiRefusedError
from trainsync_operator.kube.kinds import RUN
from trainsync_operator.kube.logging import of_attempt
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile import directories
from trainsync_operator.reconcile.apply.carry_out import Children
from trainsync_operator.reconcile.apply.child import LeftoverError, NameTakenError
from trainsync_operator.reconcile.apply.dry_run import REFUSED, DryRuns
from trainsync_operator.reconcile.apply.rejected_requests import AGAIN_SECONDS
from trainsync_operator.reconcile.decide import attempts
from trainsync_operator.reconcile.decide.attempts import Decision, Transition
from trainsync_operator.reconcile.decide.failures import OF_THE_USER
from trainsync_operator.reconcile.events import Recorder
from trainsync_operator.reconcile.fencing import of_monitor
from trainsync_operator.reconcile.observe import observe
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.plan import plan
from trainsync_operator.reconcile.reads import Cached, Confirmed, Live, ReadLiveError, Reads
from trainsync_operator.reconcile.reports import NO_PROBLEMS, MetricsRecorder, Reports
from trainsync_operator.reconcile.run import Key, Problem, Run, SpecError, parse, remembered
from trainsync_operator.reconcile.servers.carry_out import Servers

# Of what no watch tells.
_POLL_SECONDS: Final = 5.0
# An object that is being deleted is looked at after half the time that it has taken so far.
_LEFTOVER_SECONDS: Final = 1.0
_LAST_LEFTOVER_SECONDS: Final = 120.0


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
        wake: asks for a look at a run, whose turn to replace its monitor has come, or whose
            directory may be free.
    """

    api: Api
    metrics: MetricsRecorder
    monitor: MonitorSettings
    clock: Callable[[], datetime] = utc_now
    store: Store = field(default_factory=Store)
    wake: Callable[[Key], None] = lambda _: None
    events: Recorder = field(init=False)
    servers: Servers = field(init=False)
    children: Children = field(init=False)
    reports: Reports = field(init=False)
    dry_runs: DryRuns = field(init=False, default_factory=DryRuns)
    live: Live = field(init=False)
    confirmed: Confirmed = field(init=False)
    # Runs that do not begin, because others have their directories.
    without_directory: set[Key] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Events go through the same client."""
        self.events = Recorder(self.api)
        self.servers = Servers(self.events)
        self.children = Children(self.events, self.monitor, self.wake)
        self.live = Live(self.api, self.store)
        self.reports = Reports(self.live, self.events, self.metrics)
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
            self._directory_freed()
            return None
        if objects.being_deleted(raw):
            self._forget(key)
            return None  # the garbage collector takes the children
        now = self.clock()
        try:
            run = parse(raw)
        except SpecError as error:
            await self.reports.refuse(raw, str(error), now)
            return None

        if run.spec.managed_by not in (None, names.MANAGER):
            self.metrics.gone(key)
            return None
        if run.ignored:
            await self.events.once(run, "FieldsIgnored", _ignored(run), now)
        state = remembered(run.status)
        if not state.begun:
            there = await reads.indexed(RUN, run.namespace, directories.keys(raw))
            taken = directories.taken(raw, there)
            if taken is not None:
                self.without_directory.add(key)
                await self.reports.hold(run, raw, taken, now)
                return AGAIN_SECONDS
        self.without_directory.discard(key)
        observed = await observe(reads, run, self.monitor)
        of_attempt(state.attempt)
        decision, held = await self._decide(run, observed, now, reads)
        if decision.transition is not None:
            if not reads.lists_live and not _begins_anew(run, decision, observed):
                raise ReadLiveError(needs_listing=True)
            reads = reads if reads.is_live else self.confirmed
            # The new state must be in the status before any child is made for it.
            run = parse(await self.reports.decision(run, decision, observed, now))
            decision, held = await self._decide(run, observed, now, reads)
            of_attempt(decision.state.attempt)
            if decision.state.outcome is not None:
                self._directory_freed()
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

    def _directory_freed(self) -> None:
        for key in self.without_directory:
            self.wake(key)

    def _forget(self, key: Key) -> None:
        self.without_directory.discard(key)
        self.events.gone(key.namespace, key.name)
        self.servers.gone(key.namespace, key.name)
        self.dry_runs.gone(key.namespace, key.name)
        self.children.gone(key, self.clock())
        self.reports.gone(key)

    async def unable(self, key: Key, message: str) -> None:
        """Say that the operator sees or changes nothing of a run: whether it goes on is unknown.

        Raises:
            ApiError: it was not said.
        """
        await self.reports.unable(key, message, self.clock())

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
        problem, again, of_servers = todo.problem, decision.due + tuple(todo.due), NO_PROBLEMS
        soon: float | None = None
        try:
            # Servers first: a refused child of the rest must not keep a suspended run's servers.
            carried = await self.servers.carry_out(run, todo.servers, observed, now, reads)
            of_servers, later = carried
            again += () if later is None else (now + timedelta(seconds=later),)
            soon = await self.children.carry_out(run, state, todo, observed, now, reads)
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
            await self.reports.state(run, state, observed, now, todo, problem)
            error.already_reported = True
            if any(job.phase is JobPhase.RUNNING for job in observed.jobs_of(state.attempt)):
                error.at_most = AGAIN_SECONDS  # a lost pod and a save are to be seen meanwhile
            raise
        if soon == 0.0:
            return soon  # the next look reports
        written = await self.reports.state(run, state, observed, now, todo, problem, of_servers)
        key = Key(run.namespace, run.name)
        again += (*self.children.due(key, now), *self.reports.due(key))
        waits = [(moment - now).total_seconds() for moment in again]
        if held is not None and held.reason == REFUSED:
            waits.append(AGAIN_SECONDS)
        if written is not None and of_monitor(written) != of_monitor(run.status):
            waits.append(0.0)  # decided without it, and no watch tells what is in the store already
        if soon is not None:
            waits.append(soon)
        return min(waits, default=None)
