"""A run of reinforcement learning that loses processes, played in simulated time.

Pure: a shape, a way to recover and a list of faults go in, seconds come out. Time goes from one
event to the next: a batch is made, a step is trained, a save is committed, a fault strikes, a part
is back.

The model:

- Explorers together make the batch of a step in ``rollout`` seconds; each makes an equal share, in
  one turn. Trainers train on it and publish its weights (``train`` + ``sync``). With ``ahead`` 0 a
  batch is begun with the weights of the step before, so that both take turns; with 1 with those of
  the step before that, so that both work side by side.
- A save begins after every ``save_every`` steps, and is committed ``commit`` seconds later, by the
  monitor. What is not committed when trainers or the job end is lost.
- A restart in place makes trainers anew; explorers live on. Batches are thrown away, and made again
  once the trainers are back and the explorers' turns under way, whose batches are refused, have
  ended. What is generated while trainers are down is therefore not used: this is worse than what
  the library does, where explorers begin the next batch as soon as their old turn is over.
- A new job ends everything but the pods: batches and turns under way, too. An explorer that was
  lost before is not back earlier.
- A lost explorer's share of the batch is made again by the others, who are slower without it, and
  who know of the loss when its lease has run out.
- While the monitor is away nothing is committed, and no restart is over.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tests.bench.ettr.model import Fault, Outcome, Part, Recovery, Restarts, Shape, Way

_DONE: Final = 1e-9  # seconds: the rest of a turn that is due to rounding


def simulate(shape: Shape, recovery: Recovery, faults: Iterable[Fault] = ()) -> Outcome:
    """Play a run, and the same without faults.

    Raises:
        ValueError: A fault is outside of the run, or of a part without a way to recover.
    """
    struck = sorted(faults)
    for fault in struck:
        if not 1 <= fault.step <= shape.steps or not 0 <= fault.at <= 1:
            raise ValueError(f"{fault} is not in one of {shape.steps} steps")
        if fault.part not in recovery.ways:
            raise ValueError(f"{fault}: the recovery has no way for a lost {fault.part}")
    undisturbed = _Run(shape, recovery, [])
    undisturbed.play()
    run = _Run(shape, recovery, struck)
    run.play()
    return Outcome(undisturbed.now, run.now, run.down, run.trained, run.waited)


@dataclass
class _Turn:
    """All explorers' turns for one batch."""

    left: float  # seconds of work of all explorers
    refused: bool = False
    not_before: float = 0.0  # a lost share is unknown until then


@dataclass
class _Run:
    shape: Shape
    recovery: Recovery
    faults: list[Fault]
    now: float = 0.0
    down: float = 0.0
    trained: float = 0.0
    waited: float = 0.0
    step: int = 0  # the last that is trained
    made: int = 0  # the last step whose batch is made
    committed: int = 0
    furthest: int = 0
    restarts: Counter[Restarts] = field(default_factory=Counter)
    trained_at: float = math.inf  # the step under way ends
    back_at: float = -math.inf  # trainers are up from then on
    monitor_at: float = -math.inf
    new_job: bool = False
    turn: _Turn | None = None
    away: list[float] = field(default_factory=list)  # when lost explorers are back
    saves: list[tuple[float, int]] = field(default_factory=list)
    strikes: list[tuple[float, Fault]] = field(default_factory=list)

    def play(self) -> None:
        self._plan_faults()
        while self.step < self.shape.steps:
            self._begin()
            self._go_to(self._next())
            self._end()

    @property
    def _is_down(self) -> bool:
        return self.now < self.back_at

    def _begin(self) -> None:
        """Trainers and explorers begin what they can."""
        shape = self.shape
        if not self._is_down and self.trained_at == math.inf and self.made > self.step:
            self.trained_at = self.now + shape.train + shape.sync
        serves = not self._is_down or (self.recovery.keeps_batches and not self.new_job)
        may = self.made < shape.steps and self.made - shape.ahead <= self.step
        if serves and may and self.turn is None:
            self.turn = _Turn(shape.rollout)

    def _next(self) -> float:
        """The time of the next event."""
        times = [self.trained_at, *self.away]
        times += [time for time, _ in (*self.saves, *self.strikes)]
        if self._is_down:
            times.append(self.back_at)
        if self.turn is not None and self._speed > 0:
            end = self.now + self.turn.left / self._speed
            times.append(max(end, self.turn.not_before))
        return min(times)

    @property
    def _speed(self) -> float:
        return 1 - len(self.away) / self.shape.explorers

    def _go_to(self, time: float) -> None:
        passed = time - self.now
        if self._is_down:
            self.down += passed
        elif self.trained_at < math.inf:
            self.trained += passed
        else:
            self.waited += passed
        if self.turn is not None:
            self.turn.left = max(0.0, self.turn.left - passed * self._speed)
        self.now = time

    def _end(self) -> None:
        """What is over at this time."""
        now = self.now
        for due, step in self.saves:
            if due <= now:
                self.committed = step
        self.saves = [save for save in self.saves if save[0] > now]
        self.away = [back for back in self.away if back > now]
        if not self._is_down:
            self.new_job = False
        if self.trained_at <= now:
            self._step_ended()
        turn = self.turn
        if turn is not None and turn.left <= _DONE and turn.not_before <= now:
            self.made += not turn.refused
            self.turn = None
        due_now = [fault for time, fault in self.strikes if time <= now]
        self.strikes = [strike for strike in self.strikes if strike[0] > now]
        for fault in due_now:
            self._strike(fault)

    def _step_ended(self) -> None:
        self.step, self.trained_at = self.step + 1, math.inf
        if self.step % self.recovery.save_every == 0:
            due = max(self.now + self.recovery.commit, self.monitor_at)
            self.saves.append((due, self.step))
        if self.step > self.furthest:
            self.furthest = self.step
            self._plan_faults()

    def _plan_faults(self) -> None:
        """Those of the step that now begins for the first time."""
        for fault in self.faults:
            if fault.step == self.furthest + 1:
                self.strikes.append((self.now + fault.at * self.shape.period, fault))

    def _strike(self, fault: Fault) -> None:
        way = self.recovery.ways[fault.part]
        if way.restarts != Restarts.PART:
            self._lose_trainers(way)
        elif fault.part == Part.MONITOR:
            self.monitor_at = max(self.monitor_at, self.now + way.seconds)
            self.saves = [(max(due, self.monitor_at), step) for due, step in self.saves]
            if self._is_down:
                self.back_at = max(self.back_at, self.monitor_at)
        else:
            self._lose_explorer(way)

    def _lose_explorer(self, way: Way) -> None:
        living = self.shape.explorers - len(self.away)
        if living == 0:
            return  # all are starting already
        self.away.append(self.now + way.seconds)
        if self.turn is not None and not self.turn.refused:
            self.turn.left += (self.shape.rollout - self.turn.left) / living
            self.turn.not_before = self.now + min(self.recovery.lease, way.seconds)

    def _lose_trainers(self, way: Way) -> None:
        in_place = way.restarts == Restarts.TRAINERS
        wait = way.waits[min(self.restarts[way.restarts], len(way.waits) - 1)]
        self.restarts[way.restarts] += 1
        back_at = self.now + wait + way.seconds
        self.back_at = max(self.back_at, self.monitor_at, back_at)
        keeps = in_place and self.recovery.keeps_batches and self.step == self.committed
        self.step, self.trained_at, self.saves = self.committed, math.inf, []
        if not in_place:
            self.new_job, self.turn = True, None
        if not keeps:
            self.made = self.step
            if self.turn is not None:
                self.turn.refused = True
                self.turn = None if self.recovery.ends_turns else self.turn
