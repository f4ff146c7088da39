"""A run of trainer and explorers in simulated time, directed by the sync policy.

The simulation replaces the scheduler, and checks the promises at every event.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing.policy import (
    ExplorerMove,
    ExplorerView,
    RunView,
    SyncPolicy,
    admits,
    explorer_move,
    trainer_move,
    version_for,
)
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, RUNNING, STOPPED

LEASE = 20.0
_MAX_EVENTS = 100_000


@dataclass(frozen=True)
class Change:
    """An external event of an explorer.

    ``kind`` is join, leave, die, or pause (the explorer continues after ``seconds``, perhaps given
    up by then).
    """

    at: float
    kind: str
    name: str
    seconds: float = 0.0


@dataclass
class Sim:
    """One run of ``steps`` training steps.

    Args:
        next_duration: draws the duration of an action.
        batches_per_step: not with style ``fixed``, where every explorer makes a share of each step.
        aborts: draws whether the next version after the first is aborted.
    """

    policy: SyncPolicy
    first_step: int
    steps: int
    next_duration: Callable[[], float]
    changes: tuple[Change, ...]
    batches_per_step: int
    aborts: Callable[[], bool] = lambda: False
    now: float = 0.0
    step: int = 0
    versions: list[int] = field(default_factory=list)  # that were published
    aborted: set[int] = field(default_factory=set)
    busy: bool = False  # the trainer trains or publishes
    training: bool = False
    views: dict[str, ExplorerView] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)  # rolls out or fetches now
    dead: set[str] = field(default_factory=set)
    paused: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    life: dict[str, int] = field(default_factory=dict)  # which life of that id; events carry it
    queue: list[int] = field(default_factory=list)  # versions, in order of arrival
    shares: dict[int, dict[str, int]] = field(default_factory=dict)  # step -> explorer -> version
    joined_late: set[str] = field(default_factory=set)
    trained: list[int] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    @property
    def published(self) -> int | None:
        """The newest version that explorers can have."""
        return self.versions[-1] if self.versions else None

    def run(self) -> None:
        """Run to the last step. Raises AssertionError for a broken promise or a deadlock."""
        self.step = self.first_step
        for change in self.changes:
            self._at(change.at, lambda change=change: self._happens(change))
        for _ in range(_MAX_EVENTS):
            self._ask_all_explorers()
            if self.step >= self.first_step + self.steps:
                return
            if not self._events:
                assert not self._alive(), f"dead-lock: {self._view()}, busy {self.busy}"
                return  # no explorer is left to make batches
            self.now, _, event = heapq.heappop(self._events)
            event()
        raise AssertionError("no end: events without progress")

    # -- what happens -----------------------------------------------------------------------

    def _happens(self, change: Change) -> None:
        name = change.name
        if change.kind == "join":
            if name not in self.views or self.views[name].status in (STOPPED, LOST):
                self._join(name)
        elif name in self.views and name not in self.dead and name not in self.paused:
            if change.kind == "leave":
                self.views[name] = replace(self.views[name], status=STOPPED, rolling_out=False)
                self.life[name] += 1
                self.active.discard(name)
            elif change.kind == "die":
                self.dead.add(name)
                self._at(LEASE, lambda life=self.life[name]: self._expires(name, life))
            elif change.kind == "pause":
                self.paused[name] = []
                life = self.life[name]
                self._at(change.seconds, lambda: self._goes_on(name, life))
                if change.seconds >= LEASE:
                    self._at(LEASE, lambda: self._expires(name, life))

    def _join(self, name: str) -> None:
        self.life[name] = self.life.get(name, 0) + 1
        self.dead.discard(name)
        self.paused.pop(name, None)
        self.active.discard(name)
        begun = self.step + self.training
        if self.published is not None:
            self.joined_late.add(name)
        self.views[name] = ExplorerView(next_step=begun + 1)

    def _expires(self, name: str, life: int) -> None:
        if self.life[name] == life and self.views[name].status != STOPPED:
            self.views[name] = replace(self.views[name], status=LOST)

    def _goes_on(self, name: str, life: int) -> None:
        if self.life[name] != life:
            return  # another has taken its name since
        waiting = self.paused.pop(name, [])
        for event in waiting:
            event()
        view = self.views[name]
        if view.status == LOST:  # returns with its served version
            begun = self.step + self.training
            self.joined_late.add(name)
            self.views[name] = replace(
                view, status=RUNNING, next_step=max(view.next_step, begun + 1)
            )

    def _finishes(self, name: str, what: Callable[[], None]) -> None:
        """An explorer's action ends after its duration, unless the explorer dies or is stopped."""
        life = self.life[name]
        self.active.add(name)

        def event() -> None:
            if self.life[name] != life or name in self.dead:
                return
            if name in self.paused:
                self.paused[name].append(event)
                return
            self.active.discard(name)
            what()

        self._at(self.next_duration(), event)

    # -- who decides what ---------------------------------------------------------------------

    def _ask_all_explorers(self) -> None:
        asked: object = None
        while asked != (asked := self._state()):
            if not self.busy:
                self._ask_trainer()
            for name in list(self.views):
                if self._can_act(name):
                    self._ask_explorer(name)

    def _ask_trainer(self) -> None:
        if not self.busy:
            move = trainer_move(self.policy, self._view())
            assert not move.give_up
            if move.upload:
                self.busy = True
                version = self.step
                self._at(self.next_duration(), lambda: self._publishes(version))
            elif not move.wait_for and (batches := self._take()) is not None:
                self._check_training(batches)
                self.busy = self.training = True
                self._at(self.next_duration(), self._trained)

    def _ask_explorer(self, name: str) -> None:
        view = self.views[name]
        move = explorer_move(self.policy, self._view(), name)
        if move == ExplorerMove.FETCH:
            self._finishes(name, lambda: self._fetched(name))
        elif move == ExplorerMove.ROLL_OUT:
            self._check_rollout(view)
            self.views[name] = replace(
                view, status=RUNNING, rolling_out=True, rollouts=view.rollouts + 1
            )
            self._finishes(name, lambda: self._made(name))
        elif move == ExplorerMove.WAIT:
            self.views[name] = replace(view, status=REQUIRE_SYNC)

    def _publishes(self, version: int) -> None:
        assert self.published is None or version > self.published
        assert version not in self.aborted, "what was aborted cannot be published again"
        if self.versions and self.aborts():
            self.aborted.add(version)
        else:
            self.versions.append(version)
        self.busy = False

    def _trained(self) -> None:
        self.step += 1
        self.trained.append(self.step)
        self.busy = self.training = False

    def _fetched(self, name: str) -> None:
        """The explorer gets the version published at the end of the fetch, maybe newer than
        requested."""
        view = self.views[name]
        assert self.published is not None and self.published > view.version, "versions only go up"
        status = LOST if view.status == LOST else RUNNING
        self.views[name] = replace(view, version=self.published, rollouts=0, status=status)

    def _made(self, name: str) -> None:
        view = self.views[name]
        self.views[name] = made = replace(view, rolling_out=False, next_step=view.next_step + 1)
        if self.policy.style == SyncStyle.FIXED:
            self.shares.setdefault(view.next_step, {})[name] = view.version
        elif view.status != LOST or admits(self.policy, self._view(), made.version):
            self.queue.append(view.version)

    def _take(self) -> list[int] | None:
        """The versions of the batches for the next step; None if batches are missing."""
        if self.policy.style == SyncStyle.FIXED:
            step = self.step + 1
            shares = self.shares.get(step, {})
            missing = [n for n, e in self.views.items() if e.lives and e.next_step <= step]
            return list(shares.values()) if shares and not missing else None
        count = self.batches_per_step
        if len(self.queue) < count:
            return None
        taken = sorted(self.queue)[:count]
        for version in taken:
            self.queue.remove(version)
        return taken

    # -- what was promised ------------------------------------------------------------------

    def _check_training(self, versions: list[int]) -> None:
        policy, oldest = self.policy, min(versions)
        missing = self._aborted_after(oldest)
        if policy.style == SyncStyle.FIXED:
            most = policy.interval - 1 + policy.offset + policy.interval * missing
            assert self.step - oldest <= most
            due = version_for(policy, self.step + 1)
            while due in self.aborted:
                due -= policy.interval
            due = max(self.first_step, due)
            shares = self.shares.pop(self.step + 1)
            for name, version in shares.items():
                assert version >= due
                assert version == due or name in self.joined_late, "not the version of this step"
        elif policy.style == SyncStyle.FULLY_ASYNC:
            assert policy.max_staleness is not None
            assert self.step - oldest <= policy.max_staleness + missing, "too old"
        if policy.style in (SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC):
            tried = max(*self.versions, *self.aborted, -1)
            assert self.step - tried <= policy.interval - 1

    def _aborted_after(self, version: int) -> int:
        """How many versions in a row were aborted right after this one."""
        later = [v for v in self.versions if v > version]
        return sum(version < v < min(later, default=v + 1) for v in self.aborted)

    def _check_rollout(self, view: ExplorerView) -> None:
        policy = self.policy
        if policy.style == SyncStyle.TRAINER_DRIVEN:
            assert view.version == self.published or view.rollouts == 0
        elif policy.style == SyncStyle.EXPLORER_DRIVEN:
            newest = view.version == self.step or self.step in self.aborted
            assert view.rollouts < policy.interval or newest
        elif policy.style == SyncStyle.FULLY_ASYNC:
            making = sum(e.lives and e.rolling_out for e in self.views.values())
            assert policy.max_staleness is not None
            bound = policy.batches_per_step * (policy.max_staleness + 1)
            assert len(self.queue) + making + 1 <= bound, "more in store than promised"

    # -- the rest ---------------------------------------------------------------------------

    def _view(self) -> RunView:
        return RunView(
            step=self.step,
            published=self.published,
            explorers=dict(self.views),
            training=self.training,
            queued=tuple(self.queue),
            aborted=frozenset(self.aborted),
        )

    def _can_act(self, name: str) -> bool:
        absent = name in self.dead or name in self.paused or name in self.active
        return not absent and self.views[name].lives

    def _alive(self) -> list[str]:
        return [n for n, e in self.views.items() if e.lives and n not in self.dead]

    def _state(self) -> object:
        return (
            self.busy,
            self.step,
            self.published,
            len(self.aborted),
            tuple(self.queue),
            dict(self.views),
            frozenset(self.active),
        )

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, event))


def durations(speeds: list[float]) -> Iterator[float]:
    """The given durations, repeated."""
    while True:
        yield from speeds
