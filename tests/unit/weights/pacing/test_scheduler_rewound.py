"""`PaceScheduler` after trainers were restarted in place: batches are made anew, or kept."""

from dataclasses import replace

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.data.places import TrainedPlaces
from trainsync.weights.pacing.messages import TrainerPlan, Turn
from trainsync.weights.pacing.policy import ExplorerMove, SyncPolicy
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


# -- turns with places in the data -------------------------------------------------------------


class PlacedRun(Run):
    """Trainers that say which places are trained, and keep batches."""

    def __init__(self, most: int | None = None, batches: int = 1, plan: TrainerPlan = PLAN) -> None:
        super().__init__(replace(plan, batches=batches, keeps_batches=True))
        self.done = TrainedPlaces(most=most)

    def ask(self, step: int) -> list[int]:
        """The trainers' question after ``step``; places of the batches that they are given."""
        self.plan = replace(self.plan, trained=self.done)
        self.scheduler.note_trainer(self.plan, step, step)
        order = self.scheduler.order(self.explorers, step, 0.0)
        if order.batches:
            self.scheduler.begin_step(step + 1, [batch.key for batch in order.batches])
        return [batch.place for batch in order.batches]

    def train(self, step: int) -> None:
        """Train a step to its end, on one batch that is made for it."""
        self.ask(step - 1)  # nothing is made yet
        assert self.delivers(self.asks(step - 1))
        self.done = self.done.also(self.ask(step - 1))
        self.scheduler.trained(step)


@pytest.mark.parametrize("queued", [True, False])
def test_batches_with_places_are_kept_when_a_trained_step_is_lost_and_its_own_are_made_again(
    *, queued: bool
) -> None:
    run = PlacedRun()
    run.train(1)
    run.train(2)
    first = run.asks(1)  # of version 1, which is the step gone on from
    assert (first.place, run.delivers(first)) == (2, True)
    lost = run.asks(2)
    assert lost.place == 3
    assert not queued or run.delivers(lost)
    run.scheduler.rewind(1, 1)
    assert [batch.place for batch in run.scheduler.queue] == [2]
    assert not run.delivers(lost), "of weights that are no more"
    run.done = TrainedPlaces().also([0])  # as it was saved with step 1
    run.scheduler.note_trainer(replace(run.plan, trained=run.done), 1, None)
    assert [run.asks(1).place, run.asks(1).place] == [1, 1], "the place of the lost step is free"
    assert run.delivers(run.asks(1))
    assert sorted(batch.place for batch in run.scheduler.queue) == [1, 2]


def test_batches_of_the_step_that_was_under_way_are_not_trained_again_where_it_was_saved() -> None:
    run = PlacedRun()
    run.train(1)
    assert run.delivers(run.asks(1))
    (place,) = run.ask(1)
    run.done = run.done.also([place])  # saved with step 2, of which the Synchronizer has not heard
    run.scheduler.rewind(1, 2)
    assert run.ask(2) == []
    assert run.delivers(run.asks(2))
    assert run.ask(2) == [place + 1]


def test_what_is_made_between_a_restart_and_the_trainers_question_is_trained_once() -> None:
    run = PlacedRun()
    run.plan = replace(run.plan, keeps_batches=False)
    run.train(1)
    assert run.delivers(run.asks(1))
    (place,) = run.ask(1)
    run.scheduler.rewind(1, 2)
    early = run.asks(2)
    assert early.place == place, "the trainers have not said yet that they saved it"
    assert run.delivers(early)
    run.done = run.done.also([place])
    assert run.ask(2) == []
    assert run.delivers(run.asks(2))
    assert run.ask(2) == [place + 1]


def test_a_share_of_a_lost_step_is_made_again_by_the_explorer_that_delivered_it() -> None:
    run = PlacedRun(plan=TrainerPlan(SyncPolicy(SyncStyle.FIXED)))
    run.train(1)
    run.train(2)
    run.scheduler.rewind(1, 1)
    run.done = TrainedPlaces().also([0])
    run.scheduler.note_trainer(replace(run.plan, trained=run.done), 1, None)
    again = run.asks(1)
    assert (again.number, again.place) == (2, 1)
    assert run.delivers(again)
    assert [batch.place for batch in run.scheduler.queue] == [1]


def test_a_batch_from_before_a_new_scheduler_is_taken_unless_its_place_is_trained_or_made() -> None:
    run = PlacedRun()
    run.train(1)
    late, trained = run.asks(1), replace(run.asks(1), place=0)
    run.scheduler = PaceScheduler()
    run.ask(1)
    assert not run.delivers(trained)
    assert run.delivers(late)
    assert run.delivers(late), "its answer was lost"
    run.scheduler.join("b", "q", run.explorers | {"b": Explorer("q", 1e9, version=1)})
    run.explorers["b"] = Explorer("q", 1e9, version=1)
    assert not run.scheduler.deliver("b", "q", late, "x", run.explorers, 1, 0.0)
    assert [batch.place for batch in run.scheduler.queue] == [1]


def test_the_place_of_an_explorer_that_is_lost_is_made_by_another() -> None:
    run = PlacedRun()
    run.ask(0)
    assert run.asks(0).place == 0
    run.explorers["b"] = Explorer("q", 1e9, version=0)
    assert run.scheduler.turn("b", "q", run.explorers, 0, stopped=False)[1] == Turn(0, 2, 0, 1)
    del run.explorers["a"]
    assert run.scheduler.turn("b", "q", run.explorers, 0, stopped=False)[1] == Turn(0, 3, 0, 0)


def test_the_last_step_has_what_is_left_of_the_data_and_nothing_is_made_after_it() -> None:
    run = PlacedRun(most=3, batches=2)
    run.ask(0)
    for _ in range(3):
        assert run.delivers(run.asks(0))
    assert run.ask(0) == [0, 1]
    run.done = run.done.also([0, 1])
    run.scheduler.trained(1)
    assert run.ask(1) == [2]
    assert run.scheduler.turn("a", "p", run.explorers, 0, stopped=False) == (
        ExplorerMove.WAIT,
        None,
    )
