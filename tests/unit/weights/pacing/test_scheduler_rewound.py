"""`PaceScheduler` after trainers were restarted in place: batches are made anew, or kept."""

from dataclasses import replace

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing.messages import TrainerPlan, Turn
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.pacing.scheduler import PaceScheduler
from trainsync.weights.synchronizer.roster import Explorer

PLAN = TrainerPlan(SyncPolicy(style=SyncStyle.TRAINER_DRIVEN, interval=1), 1)


class Run:
    """Trainers and one explorer, which takes every version at once."""

    def __init__(self, plan: TrainerPlan = PLAN) -> None:
        self.plan = plan
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
        self.scheduler.note_trainer(self.plan, before, before)
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


@pytest.fixture
def keeping() -> Run:
    """A run that keeps its batches, and that died in step 2, with more of them made."""
    run = Run(replace(PLAN, keeps_batches=True))
    run.step(1)
    run.scheduler.note_trainer(run.plan, 1, 1)
    assert run.delivers(run.asks(1))
    (batch,) = run.scheduler.order(run.explorers, 1, 0.0).batches
    run.scheduler.begin_step(2, [batch.key])
    assert run.delivers(run.asks(1))
    return run


def test_batches_that_are_kept_come_in_their_order_and_turns_go_on(keeping: Run) -> None:
    under_way = keeping.asks(1)
    keeping.scheduler.rewind(1, 1)
    assert [batch.number for batch in keeping.scheduler.queue] == [2, 3]
    assert keeping.delivers(under_way)
    keeping.scheduler.note_trainer(keeping.plan, 1, None)
    assert keeping.scheduler.order(keeping.explorers, 1, 0.0).publish
    keeping.scheduler.note_trainer(keeping.plan, 1, 1)
    (batch,) = keeping.scheduler.order(keeping.explorers, 1, 0.0).batches
    assert batch.number == 2
    assert [batch.number for batch in keeping.scheduler.queue] == [2, 3, 4]


def test_batches_are_thrown_away_all_the_same_when_a_trained_step_is_lost(keeping: Run) -> None:
    under_way = keeping.asks(1)
    keeping.scheduler.rewind(1, 0)
    assert keeping.scheduler.queue == []
    assert not keeping.delivers(under_way)


def test_turns_of_before_a_restart_that_threw_batches_away_stay_refused(keeping: Run) -> None:
    under_way = keeping.asks(1)
    keeping.scheduler.rewind(1, 0)
    keeping.scheduler.rewind(2, 0)
    assert not keeping.delivers(under_way)


def test_batches_of_two_questions_for_one_step_are_all_kept(keeping: Run) -> None:
    (second,) = [batch for batch in keeping.scheduler.queue if batch.number == 3]
    keeping.scheduler.begin_step(2, [second.key])
    keeping.scheduler.rewind(1, 1)
    assert [batch.number for batch in keeping.scheduler.queue] == [2, 3]


def test_batches_of_a_step_whose_end_was_told_with_the_next_question_are_not_kept(
    keeping: Run,
) -> None:
    keeping.scheduler.note_trainer(keeping.plan, 2, 2)
    keeping.scheduler.begin_step(3, [("a", 3)])
    keeping.scheduler.rewind(1, 2)
    assert [batch.number for batch in keeping.scheduler.queue] == [3]


def test_an_explorer_that_joined_in_the_step_makes_its_share_when_that_of_another_is_lost() -> None:
    plan = TrainerPlan(SyncPolicy(SyncStyle.FIXED), keeps_batches=True)
    explorers = {"a": Explorer("p", 1e9, version=0)}
    scheduler = PaceScheduler()
    scheduler.join("a", "p", explorers)
    scheduler.note_trainer(plan, 0, 0)
    _, turn = scheduler.turn("a", "p", explorers, 0, stopped=False)
    assert turn is not None
    assert scheduler.deliver("a", "p", turn, "x", explorers, 0, 0.0)
    scheduler.begin_step(1, [("a", 1)])
    explorers["b"] = Explorer("q", 1e9, version=0)
    scheduler.join("b", "q", explorers)
    del explorers["a"]
    scheduler.rewind(1, 0)
    scheduler.note_trainer(plan, 0, 0)
    scheduler.discard([("a", 1)])  # the object went with its process
    _, turn = scheduler.turn("b", "q", explorers, 0, stopped=False)
    assert turn is not None
    assert turn.number == 1
