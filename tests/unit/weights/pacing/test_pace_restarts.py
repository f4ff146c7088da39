"""`ExplorerPace` when trainers are restarted in place: explorers go on, and retake lost versions.

The Synchronizer runs here, in a thread, without Ray.
"""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.errors import SupersededTrainerError
from trainsync.weights.pacing import loops
from trainsync.weights.pacing.messages import TrainerPlan
from trainsync.weights.pacing.policy import ExplorerMove
from trainsync.weights.synchronizer.roster import LOST

from tests.unit.weights.pacing.test_pace_refusals import PLANS, Client, Run, roll_out
from tests.waiting import eventually

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


KEEPING = replace(PLANS[SyncStyle.TRAINER_DRIVEN], keeps_batches=True)
CALLS: Mapping[str, tuple[Any, ...]] = {
    "next_trainer_task": (KEEPING, 0, 0, 0.05),
    "begin_step": (1, [("a", 1)]),
    "end_step": (1,),
    "finish_pace": (KEEPING, 1, 0.05),
    "note_aborted": (1, "a test"),
    "set_trainer_status": ("stopped",),
    "make_room": (1,),
    "note_missed": (1, {}, {}),
    "ready_to_nccl_sync": ("trainer", 1, 0.05),
}


@pytest.fixture
def kept(run: Run) -> Run:
    """A run whose trainers were restarted, with a batch that was kept."""
    explorer = Explorer(run, "a")
    assert run.call("next_trainer_task", KEEPING, 0, None, 0.05).publish
    run.publish(0)
    run.call("next_trainer_task", KEEPING, 0, 0, 0.05)
    assert explorer.ask("next_explorer_move", 0.05, timeout=1.0).move == ExplorerMove.FETCH
    assert explorer.update(-1) == 0
    turn = explorer.ask("next_explorer_move", 0.05, timeout=1.0).turn
    assert explorer.ask("deliver_batch", turn, ["batch"], 1.0, timeout=1.0)
    run.call("rewind", 1, 0)
    return run


@pytest.mark.parametrize("method", CALLS)
def test_calls_of_trainers_from_before_are_refused_and_change_nothing(
    kept: Run, method: str
) -> None:
    with pytest.raises(SupersededTrainerError, match="made anew"):
        kept.call(method, *CALLS[method], restarts=0)
    assert kept.call("next_trainer_task", KEEPING, 0, None, 0.05, restarts=1).publish
    kept.publish(0)
    task = kept.call("next_trainer_task", KEEPING, 0, 0, 0.05, restarts=1)
    assert [batch.payload for batch in task.batches] == ["batch"]


def test_a_question_that_waits_when_the_trainers_are_restarted_is_refused(run: Run) -> None:
    explorer = Explorer(run, "a")
    run.publish(0)

    def asked() -> bool:
        move = explorer.ask("next_explorer_move", 0.01, timeout=1.0).move
        return bool(move == ExplorerMove.FETCH)

    with ThreadPoolExecutor() as threads:
        ready = threads.submit(run.call, "ready_to_nccl_sync", "trainer", 1, 0.5, restarts=0)
        task = threads.submit(run.call, "next_trainer_task", KEEPING, 0, 0, 20.0, restarts=0)
        eventually(asked)
        run.call("rewind", 1, 0)
        with pytest.raises(SupersededTrainerError):
            task.result(10.0)
        with pytest.raises(SupersededTrainerError):
            ready.result(10.0)
    assert run.call("get_status").explorers["a"].status != LOST, "given up by trainers from before"
