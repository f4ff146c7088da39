"""`ExplorerPace` when trainers are restarted in place: explorers go on, and retake lost versions.

The Synchronizer runs here, in a thread, without Ray.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing import loops
from trainsync.weights.pacing.messages import TrainerPlan

from tests.unit.weights.pacing.test_pace_refusals import PLANS, Client, Run, roll_out

STEPS = 8


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(loops, "_POLL_SECONDS", 0.05)
    made = Run()
    yield made
    made.close()


class Explorer(Client):
    """Notes what it is told to forget, too."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run, name)
        self.forgot: list[int] = []

    def forget(self, served: int) -> None:
        self.forgot.append(served)


class Trainers:
    """One life of the trainers, which begins after ``step``."""

    def __init__(self, run: Run, plan: TrainerPlan, step: int) -> None:
        self._run, self._plan, self.step = run, plan, step
        self._sent: int | None = None
        self.batches: dict[int, tuple[Any, ...]] = {}

    def train(self, last: int, *, die_in_next: bool = False) -> None:
        """To step ``last``; and, if they are to die then, into the one after it."""
        deadline = time.monotonic() + 30.0
        while True:
            assert time.monotonic() < deadline, f"training stands still after step {self.step}"
            if self.step == last and not die_in_next:
                return
            task = self._run.call("next_trainer_task", self._plan, self.step, self._sent, 0.05)
            if task is not None and task.publish:
                self._run.publish(self.step)
                self._sent = self.step
            elif task is not None:
                keys = [batch.key for batch in task.batches]
                self._run.call("begin_step", self.step + 1, keys)
                self.batches[self.step + 1] = tuple(b.version for b in task.batches)
                if self.step == last:
                    return
                self.step += 1
                self._run.call("end_step", self.step)

    def finish(self) -> None:
        if self._sent != self.step:
            self._run.publish(self.step)
        self._run.call("finish_pace", self._plan, self.step, 20.0)
        self._run.call("set_trainer_status", "stopped")


@pytest.mark.parametrize("style", SyncStyle)
@pytest.mark.parametrize("back", [0, 2])
def test_explorers_follow_trainers_that_go_on_from_an_older_step(
    run: Run, style: SyncStyle, back: int
) -> None:
    plan = PLANS[style]
    explorer = Explorer(run, "a")
    rolling = roll_out(run, "a", explorer)
    first = Trainers(run, plan, 0)
    first.train(4, die_in_next=True)
    resumed = 4 - back
    run.call("rewind", 1, resumed)
    run.call("rewind", 1, resumed)  # the answer was lost
    second = Trainers(run, plan, resumed)
    second.train(STEPS)
    second.finish()
    rolling.join(20.0)
    assert not rolling.is_alive(), "the explorer did not end with training"
    assert explorer.served[-1] == STEPS
    assert sorted(second.batches) == list(range(resumed + 1, STEPS + 1))
    for step, versions in second.batches.items():
        assert max(versions) < step, "a batch of weights that are no more"
        if style is SyncStyle.FIXED:
            assert set(versions) == {step - 1}
    if style is SyncStyle.FIXED:
        assert explorer.forgot == ([] if back == 0 else [-1])
        expected = [0, 1, 2, 3, 4] + ([] if back == 0 else [2, 3, 4])
        assert explorer.served == [*expected, *range(5, STEPS + 1)]


def test_trainers_that_die_when_training_is_over_finish_once_more(run: Run) -> None:
    plan = PLANS[SyncStyle.FIXED]
    explorer = Explorer(run, "a")
    rolling = roll_out(run, "a", explorer)
    first = Trainers(run, plan, 0)
    first.train(3)
    first.finish()
    rolling.join(20.0)
    run.call("rewind", 1, 2)
    rolling = roll_out(run, "a", explorer)
    second = Trainers(run, plan, 2)
    second.train(3)
    second.finish()
    rolling.join(20.0)
    assert not rolling.is_alive()
    assert explorer.served[-2:] == [2, 3]
