"""`PaceScheduler` after trainers were restarted in place: batches are made as in a new attempt."""

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing.messages import TrainerPlan, Turn
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.pacing.scheduler import PaceScheduler
from trainsync.weights.synchronizer.roster import Explorer

PLAN = TrainerPlan(SyncPolicy(style=SyncStyle.TRAINER_DRIVEN, interval=1), 1)


class Run:
    """Trainers and one explorer, which takes every version at once."""

    def __init__(self) -> None:
        self.explorer = Explorer("p", 1e9, version=0)
        self.explorers = {"a": self.explorer}
        self.scheduler = PaceScheduler()
        self.scheduler.join("a", "p", self.explorers)

    def asks(self, version: int) -> Turn:
        self.explorer.version = version
        _, turn = self.scheduler.turn("a", "p", self.explorers, version, stopped=False)
        assert turn is not None
        return turn

    def delivers(self, turn: Turn) -> bool:
        version = self.explorer.version
        return self.scheduler.deliver("a", "p", turn, "x", self.explorers, version, 0.0)

    def step(self, step: int) -> list[int]:
        """Train ``step``; numbers of its batches."""
        before = step - 1
        self.scheduler.note_trainer(PLAN, before, before)
        assert self.delivers(self.asks(before))
        order = self.scheduler.order(self.explorers, before, 0.0)
        self.scheduler.begin_step(step, [batch.key for batch in order.batches])
        self.scheduler.trained(step)
        return [batch.number for batch in order.batches]


@pytest.fixture
def run() -> Run:
    return Run()


def test_batches_are_numbered_from_the_step_on_again(run: Run) -> None:
    assert [run.step(step) for step in range(1, 6)] == [[1], [2], [3], [4], [5]]
    run.scheduler.rewind(1, 2)
    assert [run.step(step) for step in range(3, 6)] == [[3], [4], [5]]


def test_a_batch_that_is_made_before_the_trainers_ask_has_the_number_of_the_step(run: Run) -> None:
    for step in range(1, 6):
        run.step(step)
    run.scheduler.rewind(1, 2)
    assert run.asks(2).number == 3


def test_no_batch_from_before_is_trained_on_since_its_prompts_are_dealt_again(run: Run) -> None:
    run.step(1)
    run.scheduler.note_trainer(PLAN, 1, 1)
    assert run.delivers(run.asks(1))
    under_way = run.asks(1)
    run.scheduler.rewind(1, 1)
    assert run.scheduler.queue == []
    assert not run.delivers(under_way)
    assert run.scheduler.queue == []
    assert run.step(2) == [2]
