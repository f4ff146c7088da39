"""A run in simulated time whose trainer and explorers do what the books say; it checks promises."""

import heapq
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat

from trainsync.api.spec import SyncStyle
from trainsync.data.places import TrainedPlaces
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.pacing.messages import Batch, TrainerPlan, Turn
from trainsync.weights.pacing.policy import ExplorerMove
from trainsync.weights.pacing.scheduler import PaceScheduler
from trainsync.weights.synchronizer.roster import LOST, Explorer, LossReason, Roster, Serving
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import Announcement, CheckpointLocation, Published, VersionMeta

LEASE = 20.0
_MAX_EVENTS = 3_000


@dataclass(frozen=True)
class Fault:
    """Explorer ``name`` dies and comes back later, is given up, or (``rebuild``) the books go, or
    (``restart``) the trainers do.

    Attributes:
        back: steps that a restart loses; -1 where the step that was under way had been saved.
    """

    at: float
    kind: str  # die, quarantine, rebuild, restart
    name: str = ""
    back: int = 0


@dataclass
class Run:
    """``steps`` training steps with these explorers.

    Args:
        saved: versions travel as saves do: the trainer goes on when it has sent one, and whether
            that is committed shows later. What ``aborts`` gives for each after the first: no.
        places: batches of the data; then the run ends when all are trained, after however many
            steps.
        most_lacking: aborted versions behind which nothing is committed yet, at most. Saves end in
            any order, so one that is slow may leave many behind it.
    """

    plan: TrainerPlan
    names: tuple[str, ...]
    steps: int
    durations: Iterator[float]
    faults: tuple[Fault, ...] = ()
    saved: bool = False
    aborts: Iterator[bool] = field(default_factory=lambda: repeat(False))
    most_lacking: int = sys.maxsize
    places: int | None = None
    now: float = 0.0
    step: int = 0
    sent: int | None = None
    busy: bool = False
    state: WeightsState = field(default_factory=lambda: WeightsState(lease_seconds=LEASE))
    books: PaceScheduler = field(init=False)
    versions: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    sent_again: set[int] = field(default_factory=set)
    """Versions that were aborted before a restart: batches made without them are kept."""
    lives: dict[str, int] = field(default_factory=dict)
    acting: set[str] = field(default_factory=set)
    trained: list[tuple[Batch, ...]] = field(default_factory=list)
    most_queued: int = 0
    restarts: int = 0
    refused: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    def __post_init__(self) -> None:
        """New books."""
        self.books = PaceScheduler(self.state.versions.aborted)

    @property
    def roster(self) -> Roster:
        """Of the explorers."""
        return self.state.roster

    @property
    def published(self) -> int | None:
        """The newest version that explorers can have."""
        return None if self.state.versions.published is None else self.state.version

    def run(self) -> None:
        """To the last step; AssertionError for a dead-lock."""
        for name in self.names:
            self._starts(name)
        for fault in self.faults:
            self._at(fault.at, partial(self._strikes, fault))
        for _ in range(_MAX_EVENTS):
            if self._ended():
                return
            self._ask()
            assert self._events, f"dead-lock after step {self.step}: {self.books}"
            self.now, _, event = heapq.heappop(self._events)
            event()
            self.most_queued = max(self.most_queued, len(self.books.queue))
        raise AssertionError("no end: events without progress")

    def done(self) -> TrainedPlaces:
        """The places in the data that were trained, as the trainers know."""
        batches = [batch for step in self.trained[: self.step] for batch in step]
        return TrainedPlaces(most=self.places).also(batch.place for batch in batches)

    def _ended(self) -> bool:
        if self.places is None:
            return self.step >= self.steps
        return len(self.done()) == self.places

    def _ask(self) -> None:
        before: object = None
        while before != (before := (self.busy, self.published, frozenset(self.acting))):
            if not self.busy and not self._ended():
                self._ask_trainer()
            for name in self.names:
                if name in self.lives and name not in self.acting:
                    self._ask_explorer(name)

    def _ask_trainer(self) -> None:
        done = None if self.places is None else self.done()
        self.books.note_trainer(replace(self.plan, trained=done), self.step, self.sent)
        try:
            order = self.books.order(self.roster.explorers, self.published, self.now)
        except WeightsTimeoutError:
            assert any(fault.kind == "die" for fault in self.faults), "nobody had died"
            return self._in(1.0, lambda: None)  # a new attempt asks again
        for name in order.give_up:
            self.roster.give_up(name, "late", LossReason.NOT_READY)
        if order.publish:
            assert self.sent != self.step, "sent twice"
            self.sent, self.busy = self.step, True
            seconds, version = next(self.durations), self.step
            self._of_trainers(0.0 if self.saved else seconds, self._asks)
            self._of_trainers(seconds, lambda: self._arrives(version))
        elif order.batches:
            self._check(order.batches)
            self.books.begin_step(self.step + 1, [batch.key for batch in order.batches])
            self.trained.append(order.batches)
            self.busy = True
            self._of_trainers(next(self.durations), self._trains)
        elif order.seconds:
            self._in(order.seconds + 0.001, lambda: None)  # asks again
        return None

    def _asks(self) -> None:
        self.busy = False

    def _arrives(self, version: int) -> None:
        lost = self.published is not None and next(self.aborts, False)
        lacking = sum(v > (self.published or 0) for v in self.aborted)
        if lost and lacking < self.most_lacking:
            self.aborted.append(version)
            self.state.versions.note_aborted(version, "a test")
        elif self.published is None or version > self.published - self.state.versions.reopened:
            self.versions.append(version)
            location = CheckpointLocation(f"global_step_{version}", "sha256:0", 0, version)
            meta = VersionMeta(version, f"d{version}", (), "checkpoint", 1)
            self.state.announce(Announcement(Published(meta, location=location)), self.now)

    def _trains(self) -> None:
        self.step, self.busy = self.step + 1, False
        self.books.trained(self.step)

    def _ask_explorer(self, name: str) -> None:
        self._back(name)
        move, turn = self.books.turn(
            name, self._session(name), self.roster.explorers, self.published, stopped=False
        )
        if move == ExplorerMove.FETCH:
            restarts = self.restarts
            self._acts(name, lambda: self._fetched(name, restarts))
        elif turn is not None:
            assert turn.version == self._known(name).version
            self._acts(name, lambda: self._delivers(name, turn))

    def _fetched(self, name: str, restarts: int) -> None:
        self._back(name)
        if restarts != self.restarts:
            return  # what was fetched may be no more, and is not believed
        assert self.published is not None and self.published > self._known(name).version
        self._known(name).version = self.published
        self._known(name).digest = f"d{self.published}"
        self._known(name).returning = False

    def _delivers(self, name: str, turn: Turn) -> None:
        self._back(name)
        if self.books.open:
            explorers, session = self.roster.explorers, self._session(name)
            taken = self.books.deliver(
                name, session, turn, None, explorers, self.published, self.now
            )
            self.refused += not taken

    def _back(self, name: str) -> None:
        """An explorer that was given up meanwhile registers again when it speaks, as clients do."""
        if self._known(name).status == LOST:
            served = self._known(name).version
            serving = Serving(served, f"d{served}")
            explorer = self.roster.rejoin(name, self._session(name), serving, self.now)
            explorer.returning = self.published is None or explorer.version < self.published

    def _strikes(self, fault: Fault) -> None:
        if fault.kind == "rebuild":
            self.books = PaceScheduler(self.state.versions.aborted)
            self.books.rewind(*self.state.rewound)
        elif fault.kind == "restart":
            self._restarts(min(max(0, self.step - fault.back), len(self.trained)))
        elif fault.name in self.lives and fault.kind == "quarantine":
            if self._known(fault.name).status != LOST:
                self.roster.give_up(fault.name, "a test", LossReason.QUARANTINED)
        elif fault.name in self.lives:
            life = self.lives.pop(fault.name)
            self.acting.discard(fault.name)
            self._in(LEASE, lambda: self._starts(fault.name, life + 1))

    def _restarts(self, step: int) -> None:
        self.restarts += 1
        self.state.rewind(self.restarts, step)
        gone = [v for v in self.books.in_flight(self.published) if v < step]
        for version in gone:
            self.state.versions.note_aborted(version, "restarted")
        self.books.rewind(self.restarts, step)
        self.step, self.sent, self.busy = step, None, True
        self._of_trainers(next(self.durations), self._asks)  # until they ask
        del self.trained[step:]
        self.versions = [version for version in self.versions if version <= step]
        self.sent_again |= set(self.aborted)
        self.aborted = [version for version in [*self.aborted, *gone] if version < step]

    def _of_trainers(self, seconds: float, event: Callable[[], None]) -> None:
        """Unless they are restarted before."""
        restarts = self.restarts
        self._in(seconds, lambda: event() if restarts == self.restarts else None)

    def _starts(self, name: str, life: int = 0) -> None:
        if name in self.roster.explorers and self._known(name).status != LOST:
            self.roster.give_up(name, "silent", LossReason.SILENT)
        self.lives[name] = life
        self.roster.register(name, self._session(name), self.now)
        self.books.join(name, self._session(name), self.roster.explorers)

    def _check(self, batches: tuple[Batch, ...]) -> None:
        policy, oldest = self.plan.policy, min(batch.version for batch in batches)
        assert len({batch.key for batch in batches}) == len(batches), "trained on twice"
        if self.places is not None:
            done = self.done()
            for batch in batches:
                assert batch.place not in done, "its prompts were trained before"
                done = done.also([batch.place])
        missing = self._aborted_after(oldest)
        missing += sum(oldest < version <= self.step for version in self.sent_again)
        if policy.style == SyncStyle.FIXED:
            assert {batch.number for batch in batches} == {self.step + 1}
            most = policy.interval - 1 + policy.offset + policy.interval * missing
            assert self.step - oldest <= most
        elif self.places is None:
            assert len(batches) == self.plan.batches
        if policy.style == SyncStyle.FULLY_ASYNC:
            assert policy.max_staleness is not None
            assert self.step - oldest <= policy.max_staleness + missing, "too old"

    def _aborted_after(self, version: int) -> int:
        """How many versions in a row were aborted right after this one."""
        later = [v for v in self.versions if v > version]
        return sum(version < v < min(later, default=v + 1) for v in self.aborted)

    def _acts(self, name: str, then: Callable[[], None]) -> None:
        self.acting.add(name)
        life = self.lives[name]

        def done() -> None:
            if self.lives.get(name) == life:
                self.acting.discard(name)
                then()

        self._in(next(self.durations), done)

    def _known(self, name: str) -> Explorer:
        return self.roster.explorers[name]

    def _session(self, name: str) -> str:
        return f"{name}-{self.lives[name]}"

    def _in(self, seconds: float, event: Callable[[], None]) -> None:
        self._at(self.now + seconds, event)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, event))
