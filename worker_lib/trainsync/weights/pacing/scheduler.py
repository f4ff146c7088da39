"""Schedules batches: which explorer makes one, which are queued, which step comes next.

`trainsync.weights.pacing.policy` decides by this. Nothing here does I/O, reads a clock or knows
Ray. Explorers *take turns*: each turn makes one batch with one version. A batch has a number: with
style ``fixed`` that of the training step it is for (every explorer makes a share of every step),
with the others its number in the run, and then training takes the oldest batches first.

A new scheduler, of a Synchronizer that was rebuilt, begins empty: queued batches are made again,
and explorers that took turns go on when they are still known (`Explorer.paced`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainsync.api.spec import SyncStyle
from trainsync.data.places import TrainedPlaces
from trainsync.weights.errors import WeightsError, WeightsTimeoutError
from trainsync.weights.pacing.aborted_limit import check_aborted
from trainsync.weights.pacing.messages import Batch, TrainerOrder, TrainerPlan, Turn
from trainsync.weights.pacing.policy import (
    ExplorerMove,
    ExplorerView,
    RunView,
    admits,
    explorer_move,
    trainer_move,
)
from trainsync.weights.synchronizer.roster import (
    LOST,
    REQUIRE_SYNC,
    RUNNING,
    STOPPED,
    Explorer,
    causes,
)

# For styles without a bound: explorers wait while batches for so many steps are ready.
_STEPS_AHEAD = 2


@dataclass
class _ExplorerEntry:
    session: str
    next_step: int
    version: int = -1
    rollouts: int = 0  # with that version
    turn: Turn | None = None
    delivered: int = -1  # number of the last batch
    delivered_at: float = -math.inf
    waiting: bool = False


@dataclass
class PaceScheduler:
    """The schedule of one run. ``explorers`` of every call are those of the Synchronizer's roster.

    Args:
        aborted: versions whose saves were aborted, and why; the Synchronizer's state updates it.
    """

    aborted: Mapping[int, str] = field(default_factory=dict)
    plan: TrainerPlan | None = None
    step: int | None = None
    sent: int | None = None
    training: bool = False
    finishing: bool = False
    queue: list[Batch] = field(default_factory=list)
    _entries: dict[str, _ExplorerEntry] = field(default_factory=dict)
    _last_number: int = 0
    _waiting_since: float | None = None
    _sent: list[int] = field(default_factory=list)
    _training_on: list[Batch] = field(default_factory=list)
    _rewound: tuple[int, int] = (0, -1)
    _rewinds: list[tuple[int, int]] = field(default_factory=list)
    _refused_before: int = 0  # turns of before this restart
    _done: TrainedPlaces | None = None  # of the data, where turns have places in it
    _sends_again: bool = False

    @property
    def open(self) -> bool:
        """Whether the trainer has said which step it has completed."""
        return self.plan is not None

    @property
    def explorers(self) -> frozenset[str]:
        """The explorers that take turns, as they were known at the last call."""
        return frozenset(self._entries)

    def in_flight(self, published: int | None) -> list[int]:
        """The versions that the trainer sent and that neither arrived nor were aborted."""
        known = -1 if published is None else published
        return [v for v in self._sent if v > known and v not in self.aborted]

    def rewind(self, number: int, step: int) -> None:
        """The trainers were restarted, for the ``number``-th time, and go on from ``step``.

        Batches are kept where the plan says so: those queued, those of the step that was under
        way, and the turns that explorers have. Where a step is lost that was trained, only if they
        have places in the data, and not those of weights that are no more: the places of the lost
        step's batches are free again once the trainers say which are trained.

        Else all of them are thrown away or refused, as in a new attempt: the checkpoint's data
        cursor deals their prompts again, and they are numbered from ``step`` on.

        The weights of ``step`` are to be published once more. The same call again changes nothing.
        """
        if number <= self._rewound[0]:
            return
        loses = step != self.step
        kept = self.plan is not None and self.plan.keeps_batches
        kept &= not loses or self._done is not None
        self._rewound, self._sends_again = (number, step), True
        self._rewinds.append(self._rewound)
        self.step, self.sent, self.training, self.finishing = step, None, False, False
        self._sent, self._waiting_since = [], None
        made = [*self._training_on, *self.queue] if kept else []
        self.queue = [batch for batch in made if batch.version <= step]
        self._training_on = []
        if kept:
            for name, entry in self._entries.items():
                if entry.turn is not None and self._is_lost(entry.turn):
                    entry.turn = None
                if loses:
                    entry.delivered = -1
                # One that joined in the step that died may be needed for that: the batches of
                # another are lost if that dies, too.
                entry.next_step = self._first_unmade(name, step + 1)
            return
        self._refused_before = number
        self._last_number = step * self.plan.batches if self.plan is not None else 0
        for entry in self._entries.values():
            entry.turn, entry.rollouts = None, 0
            entry.next_step, entry.delivered = step + 1, -1

    def note_trainer(
        self, plan: TrainerPlan, step: int, sent: int | None = None, *, finishing: bool = False
    ) -> None:
        """The trainer has completed ``step`` and wants to go on (or, ``finishing``, to end).

        Args:
            sent: the last version that it published; it may be on its way, to be committed.
        """
        if step != self.step:
            self._training_on = []
        self.plan, self.step, self.training, self.finishing = plan, step, False, finishing
        self._done = plan.trained
        self._drop_trained(step)
        self.sent = sent
        self._sends_again &= sent is None
        if sent is not None and sent not in self._sent:
            self._sent.append(sent)
        if plan.policy.style != SyncStyle.FIXED:
            self._last_number = max(self._last_number, step * plan.batches)

    def _drop_trained(self, step: int) -> None:
        """Drop queued batches that were trained in the step under way at the restart.

        Explorers may have made some of them again since, before the trainers said which are
        trained.
        """
        done = self._done
        if done is None:
            return
        names = {batch.explorer for batch in self.queue if batch.place in done}
        self.queue = [batch for batch in self.queue if batch.place not in done]
        for name in names & self._entries.keys():
            entry = self._entries[name]
            entry.next_step = min(entry.next_step, self._first_unmade(name, step + 1))

    def order(
        self, explorers: Mapping[str, Explorer], published: int | None, now: float
    ) -> TrainerOrder:
        """The order for the trainer before its next step, after `note_trainer`.

        Raises:
            WeightsTimeoutError: there was nothing to train on for the policy's timeout, and no
                explorer is left to be given up for it.
            WeightsUnavailableError: the first version was aborted, or too many in a row were, not
                counting those that were skipped.
        """
        plan = self._plan()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        waited = now - self._waiting_since
        check_aborted(self.aborted, published)
        self._sent = self.in_flight(published)
        view = self._view(explorers, published, waited_for=True)
        move = trainer_move(plan.policy, view, waited)
        if move.upload or self._sends_again:
            self._waiting_since = None
            return TrainerOrder(publish=True)
        if not (move.wait_for | move.give_up) and (batches := self._next_batches(view)):
            return TrainerOrder(batches=batches)
        # Each explorer has its own time. A version on its way cannot be fetched by any.
        held_up_by = move.wait_for | move.give_up
        if plan.policy.style == SyncStyle.FIXED and not self._sent:
            held_up_by |= self._missing(view)
        ends = {name: self._progress([name]) + plan.policy.timeout for name in held_up_by}
        if late := frozenset(name for name, end in ends.items() if now >= end):
            self._waiting_since = now
            return TrainerOrder(give_up=late)
        idle = self._progress(self._entries)
        end = min(ends.values(), default=idle + plan.policy.timeout)
        if now < end:
            return TrainerOrder(seconds=end - now)
        self._waiting_since = now
        if self._sent:
            raise WeightsTimeoutError(
                f"version {self._sent[0]} was published {now - idle:.0f} s ago, and explorers"
                f" cannot have that version yet; the newest for them is {published}"
                f"{causes(explorers)}"
            )
        if late := frozenset(n for n, e in view.explorers.items() if e.rolling_out):
            return TrainerOrder(give_up=late)
        raise WeightsTimeoutError(
            f"no explorer made a batch for step {view.step + 1} within {now - idle:.0f} s;"
            f" explorers that take part are {sorted(self._entries) or 'none'}{causes(explorers)}"
        )

    def begin_step(self, step: int, keys: Iterable[tuple[str, int]]) -> None:
        """Training on the batches of these keys begins; a second call is no error."""
        taken = set(keys)
        # Kept until they are trained on: a trainer that dies before needs them again.
        self._training_on += [batch for batch in self.queue if batch.key in taken]
        self.queue = [batch for batch in self.queue if batch.key not in taken]
        self.step, self.training, self._waiting_since = step - 1, True, None

    def trained(self, step: int) -> None:
        """Training step ``step`` is complete."""
        self.step, self.training = step, False
        if self._done is not None:
            self._done = self._done.also(batch.place for batch in self._training_on)
        self._training_on = []

    def discard(self, keys: Iterable[tuple[str, int]]) -> None:
        """Have lost batches made again, by explorers that live, within the policy's timeout."""
        gone = set(keys)
        for batch in self.queue:
            if batch.key in gone and (entry := self._entries.get(batch.explorer)):
                entry.next_step, entry.delivered = min(entry.next_step, batch.number), -1
                self._waiting_since = None
        self.queue = [batch for batch in self.queue if batch.key not in gone]

    # -- the explorers' side --------------------------------------------------------------

    def join(self, name: str, session: str, explorers: Mapping[str, Explorer]) -> None:
        """An explorer takes turns from now on; the first is for a step that has not begun."""
        explorers[name].paced = True
        if (known := self._entries.get(name)) is None or known.session != session:
            self._enter(name, session)

    def turn(
        self,
        name: str,
        session: str,
        explorers: Mapping[str, Explorer],
        published: int | None,
        *,
        stopped: bool,
    ) -> tuple[ExplorerMove, Turn | None]:
        """The next move of explorer ``name``; the turn, if that is to make a batch.

        A turn that it had and did not `deliver` is taken back.
        """
        if stopped:
            return ExplorerMove.STOP, None
        self.join(name, session, explorers)
        if not self.open:
            return ExplorerMove.WAIT, None
        entry, explorer = self._entries[name], explorers[name]
        if entry.turn is not None:
            entry.turn, entry.rollouts = None, max(0, entry.rollouts - 1)
        entry.next_step = max(entry.next_step, self._begun() + 1)
        if self.finishing:
            behind = published is not None and explorer.version < published
            fetch = behind and explorer.refused != published
            return (ExplorerMove.FETCH if fetch else ExplorerMove.WAIT), None
        plan, view = self._plan(), self._view(explorers, published)
        move = explorer_move(plan.policy, view, name)
        entry.waiting = move == ExplorerMove.WAIT
        explorer.status = REQUIRE_SYNC if entry.waiting else RUNNING
        if move == ExplorerMove.ROLL_OUT:
            place = -1 if self._done is None else self._done.first_left(self._held())
            if self._is_full(plan) or place is None:
                return ExplorerMove.WAIT, None
            entry.rollouts += 1
            number = self._number(plan, entry)
            entry.turn = Turn(explorer.version, number, self._rewound[0], place)
        return move, entry.turn

    def deliver(
        self,
        name: str,
        session: str,
        turn: Turn,
        payload: Any,
        explorers: Mapping[str, Explorer],
        published: int | None,
        now: float,
    ) -> bool:
        """Queue the batch of ``turn``; False when training has no use for it any more.

        Delivering it twice is no error.
        """
        self.join(name, session, explorers)
        entry, plan = self._entries[name], self._plan()
        if turn.restarts < self._refused_before or self._is_lost(turn):
            return False  # its prompts are dealt again
        if entry.delivered == turn.number:
            return True
        expected, entry.turn = entry.turn == turn, None
        if self._done is not None and (turn.place in self._done or turn.place in self._held()):
            return any(batch.key == (name, turn.number) for batch in self.queue)
        # After `entry.turn` is taken back, so that the batch is not counted twice.
        if not self._wanted(plan, entry, turn, self._view(explorers, published), expected):
            return False
        entry.delivered = turn.number
        self._last_number = max(self._last_number, turn.number)
        self.queue.append(Batch(name, turn.version, turn.number, payload, turn.place))
        entry.next_step = self._first_unmade(name, entry.next_step)
        entry.delivered_at = now
        return True

    # -- the rest ---------------------------------------------------------------------------

    def _plan(self) -> TrainerPlan:
        if self.plan is None:
            raise WeightsError("the trainer has not reported its step yet")
        return self.plan

    def _is_lost(self, turn: Turn) -> bool:
        """Whether training went on from before its version since."""
        return any(turn.version > step for n, step in self._rewinds if n > turn.restarts)

    def _held(self) -> set[int]:
        """Places in the data of the batches that are made, or are being made."""
        made = {batch.place for batch in (*self.queue, *self._training_on)}
        turns = (entry.turn for entry in self._entries.values())
        return made | {turn.place for turn in turns if turn is not None}

    def _all_dealt(self) -> bool:
        """Whether no place in the data is left for another batch."""
        return self._done is not None and self._done.first_left(self._held()) is None

    def _begun(self) -> int:
        return (self.step or 0) + self.training

    def _number(self, plan: TrainerPlan, entry: _ExplorerEntry) -> int:
        if plan.policy.style == SyncStyle.FIXED:
            return entry.next_step
        self._last_number += 1
        return self._last_number

    def _is_full(self, plan: TrainerPlan) -> bool:
        unbounded = plan.policy.style in (SyncStyle.TRAINER_DRIVEN, SyncStyle.EXPLORER_DRIVEN)
        return unbounded and len(self.queue) >= _STEPS_AHEAD * plan.batches

    def _wanted(
        self, plan: TrainerPlan, entry: _ExplorerEntry, turn: Turn, view: RunView, expected: bool
    ) -> bool:
        if plan.policy.style == SyncStyle.FIXED:
            # A new scheduler may lack the share before it: then that is made again first.
            in_turn = expected or turn.number == entry.next_step
            return in_turn and turn.number > self._begun()
        return expected or admits(plan.policy, view, turn.version)

    def _view(
        self, explorers: Mapping[str, Explorer], published: int | None, *, waited_for: bool = False
    ) -> RunView:
        """The run, as the policy sees it.

        Args:
            waited_for: the trainer's view: without explorers that are back and have not caught up,
                and with the version that it sent counted as published.
        """
        self._follow(explorers)
        in_flight = self.in_flight(published)
        aborted = [v for v in self.aborted if not in_flight or v < in_flight[0]]
        published = self.sent if waited_for and in_flight else published
        return RunView(
            step=self.step or 0,
            published=published,
            training=self.training,
            queued=tuple(batch.version for batch in self.queue),
            aborted=aborted,
            explorers={
                name: ExplorerView(
                    version=explorers[name].version,
                    status=REQUIRE_SYNC if entry.waiting else RUNNING,
                    rollouts=entry.rollouts,
                    rolling_out=entry.turn is not None,
                    next_step=entry.next_step,
                    refused=explorers[name].refused,
                )
                for name, entry in self._entries.items()
                if explorers[name].takes_part or entry.turn is not None or not waited_for
            },
        )

    def _follow(self, explorers: Mapping[str, Explorer]) -> None:
        """Drop explorers that are lost or gone; take back those of an earlier scheduler."""
        lives = {n: e for n, e in explorers.items() if e.status not in (LOST, STOPPED)}
        for name in list(self._entries):
            if name not in lives or lives[name].session != self._entries[name].session:
                del self._entries[name]
        for name, explorer in lives.items():
            if explorer.paced and name not in self._entries:
                self._enter(name, explorer.session)
            if (entry := self._entries.get(name)) and entry.version != explorer.version:
                entry.version, entry.rollouts = explorer.version, 0

    def _enter(self, name: str, session: str) -> None:
        """Schedule an explorer. A share that it made in an earlier life still counts."""
        self._entries[name] = _ExplorerEntry(session, self._first_unmade(name, self._begun() + 1))

    def _first_unmade(self, name: str, step: int) -> int:
        """The first step from ``step`` on of which no share of this explorer is queued."""
        while any(batch.key == (name, step) for batch in self.queue):
            step += 1
        return step

    def _next_batches(self, view: RunView) -> tuple[Batch, ...]:
        """The batches of the next step; none while some are missing."""
        plan, step = self._plan(), view.step + 1
        if plan.policy.style == SyncStyle.FIXED:
            self.queue = [batch for batch in self.queue if batch.number >= step]
            shares = [batch for batch in self.queue if batch.number == step]
            return () if self._missing(view) else tuple(sorted(shares, key=lambda b: b.explorer))
        being_made = any(entry.turn is not None for entry in self._entries.values())
        if len(self.queue) < plan.batches and (being_made or not self._all_dealt()):
            return ()
        return tuple(sorted(self.queue, key=lambda batch: batch.version)[: plan.batches])

    def _missing(self, view: RunView) -> frozenset[str]:
        dealt = self._all_dealt()
        return frozenset(
            name
            for name, explorer in view.explorers.items()
            if explorer.next_step <= view.step + 1 and (explorer.rolling_out or not dealt)
        )

    def _progress(self, names: Iterable[str]) -> float:
        """When the trainer began to wait, or one of these explorers delivered since."""
        times = [self._entries[name].delivered_at for name in names]
        since = -math.inf if self._waiting_since is None else self._waiting_since
        return max([since, *times])
