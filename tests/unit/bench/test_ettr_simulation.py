"""The simulation of a run that loses processes keeps its own accounts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.ettr import bench_ettr_simulated, recoveries
from tests.bench.ettr.model import Fault, Outcome, Part, Recovery, Restarts, Shape, Way
from tests.bench.ettr.schedule import draw
from tests.bench.ettr.simulation import simulate

# A step: 60 s of rollouts, then 30 of training, then 10 until explorers have the weights.
IN_TURNS = Shape(steps=10, rollout=60, train=30, sync=10, explorers=4)
SIDE_BY_SIDE = replace(IN_TURNS, rollout=100, train=90, ahead=1)
OURS = Recovery(
    {
        Part.TRAINER: Way(Restarts.TRAINERS, 5),
        Part.POD: Way(Restarts.JOB, 20),
        Part.EXPLORER: Way(Restarts.PART, 120),
        Part.MONITOR: Way(Restarts.PART, 50),
    },
    commit=8,
)
KEEPS = replace(OURS, keeps_batches=True)
ENDS = replace(OURS, ends_turns=True)
PARTS = tuple(OURS.ways)

shapes = st.sampled_from([IN_TURNS, SIDE_BY_SIDE, replace(IN_TURNS, explorers=1)])
recovery = st.sampled_from([OURS, replace(OURS, save_every=3), ENDS, KEEPS])


def faults_in(
    steps: st.SearchStrategy[int], parts: tuple[Part, ...] = PARTS
) -> st.SearchStrategy[Fault]:
    at = st.integers(0, 20).map(lambda twentieths: twentieths / 20)
    return st.builds(Fault, step=steps, at=at, part=st.sampled_from(parts))


anywhere = st.integers(1, IN_TURNS.steps)
faults = st.lists(faults_in(anywhere), max_size=8)
of_trainers = st.lists(faults_in(anywhere, (Part.TRAINER, Part.POD)), max_size=8)
apart = st.lists(faults_in(st.sampled_from([1, 4, 7, 10])), unique_by=lambda fault: fault.step)


def added(outcome: Outcome, seconds: float, shape: Shape = IN_TURNS) -> bool:
    """Whether a run took ``seconds`` longer than without faults."""
    return math.isclose(outcome.total, 100 * shape.steps + seconds)


@pytest.mark.parametrize("shape", [IN_TURNS, SIDE_BY_SIDE])
def test_a_run_without_faults_is_effective_to_the_last_second(shape: Shape) -> None:
    run = simulate(shape, OURS)
    assert (run.ratio, run.lost, run.pause) == (1.0, 0.0, 0.0)
    fill = 100 if shape.ahead else 0  # the first batch is made before there is a step beside it
    assert run.total == 100 * shape.steps + fill


@pytest.mark.parametrize(
    ("recovery", "at", "seconds"),
    [
        # In a rollout. The turns of before end 60 s after their begin, and then it is made again.
        (OURS, 0.2, 60),
        # The trainers come back after that.
        (OURS, 0.58, 63),
        (ENDS, 0.2, 20 + 5),
        # The batch is ready before the trainers are needed, or in the making until they are back.
        (KEEPS, 0.2, 0),
        (KEEPS, 0.58, 3),
        # In the training.
        (OURS, 0.8, 80 + 5),
        (ENDS, 0.8, 80 + 5),
        (KEEPS, 0.8, 20 + 5),
        # While the save of the step before is not committed: that step is lost, too.
        (OURS, 0.05, 100 + 60),
        (ENDS, 0.05, 100 + 5 + 5),
        # A save every third step: the two steps since the last.
        (replace(ENDS, save_every=3), 0.2, 200 + 20 + 5),
    ],
)
def test_a_lost_trainer_costs_its_step_and_the_pause(
    recovery: Recovery, at: float, seconds: float
) -> None:
    assert added(simulate(IN_TURNS, recovery, [Fault(6, at)]), seconds)


def test_side_by_side_a_lost_trainer_costs_the_batch_that_explorers_had_begun_too() -> None:
    # Until the turns for the next step end, and until the batch of this one is made again.
    lost = simulate(SIDE_BY_SIDE, OURS, [Fault(6, 0.3)])
    assert lost.total - lost.effective == 100 + 100
    kept = simulate(SIDE_BY_SIDE, KEEPS, [Fault(6, 0.3)])
    assert kept.total - kept.effective == 30 + 5


def test_a_new_job_costs_the_step_its_rollouts_and_its_start() -> None:
    assert added(simulate(IN_TURNS, KEEPS, [Fault(6, 0.2, Part.POD)]), 20 + 20)
    assert added(simulate(IN_TURNS, KEEPS, [Fault(6, 0.8, Part.POD)]), 80 + 20)


def test_each_restart_waits_as_long_as_its_number_says() -> None:
    way = Way(Restarts.JOB, 20, waits=(0, 1, 2))
    waiting = recoveries.with_way(OURS, Part.POD, way)
    strikes = [Fault(step, 0.2, Part.POD) for step in (2, 4, 6, 8)]
    assert added(simulate(IN_TURNS, waiting, strikes), 4 * 40 + 0 + 1 + 2 + 2)


def test_a_lost_explorer_costs_its_share_and_its_speed_until_it_is_back() -> None:
    # Of 60 s three explorers of four have 40 left, and the fourth's 20 are made again; at three
    # quarters of the speed that takes 60 s instead of 40. It is back 120 s after its death:
    # the first 40 s of the next batch are slow, too.
    outcome = simulate(IN_TURNS, OURS, [Fault(6, 0.2, Part.EXPLORER)])
    first = (40 + 20 / 4) / 0.75 - 40
    back = 120 - (40 + first) - 40
    assert added(outcome, first + back * 0.25)
    assert outcome.down == 0


def test_the_only_explorer_makes_its_batch_again_when_it_is_back() -> None:
    alone = replace(IN_TURNS, explorers=1)
    outcome = simulate(alone, OURS, [Fault(6, 0.2, Part.EXPLORER)])
    assert added(outcome, 20 + 120)


def test_a_lost_monitor_costs_nothing_by_itself_and_holds_up_a_restart() -> None:
    gone = Fault(6, 0.7, Part.MONITOR)
    assert added(simulate(IN_TURNS, ENDS, [gone]), 0)
    assert added(simulate(IN_TURNS, ENDS, [gone, Fault(6, 0.8)]), 80 + 40)


def test_what_is_committed_late_since_the_monitor_is_away_is_lost_with_the_trainers() -> None:
    gone = Fault(5, 0.99, Part.MONITOR)  # step 5 is committed 49 s after its end
    assert added(simulate(IN_TURNS, ENDS, [gone, Fault(6, 0.5)]), 50 + 5)
    assert added(simulate(IN_TURNS, ENDS, [gone, Fault(6, 0.4)]), 100 + 40 + 9)


@given(shapes, recovery, faults)
def test_effective_lost_and_paused_seconds_are_all_that_there_are(
    shape: Shape, recovery: Recovery, faults: list[Fault]
) -> None:
    run = simulate(shape, recovery, faults)
    assert min(run.effective, run.lost, run.pause, run.ratio) >= 0
    assert math.isclose(run.effective + run.lost + run.pause, run.total)
    assert math.isclose(run.trained + run.waited + run.down, run.total)
    steps = run.trained / (shape.train + shape.sync)
    assert steps >= shape.steps or math.isclose(steps, shape.steps), "steps that nobody trained"


@given(shapes, of_trainers, st.integers(0, 7))
def test_one_more_loss_of_trainers_never_gives_a_higher_ratio(
    shape: Shape, faults: list[Fault], left_out: int
) -> None:
    # With turns that end at once. Else a second fault may find explorers idle after the first, and
    # wait for no turn.
    check_one_more(shape, ENDS, faults, left_out)


@given(shapes, apart, st.integers(0, 3))
def test_one_more_fault_apart_from_the_others_never_gives_a_higher_ratio(
    shape: Shape, faults: list[Fault], left_out: int
) -> None:
    check_one_more(shape, OURS, faults, left_out)


def check_one_more(shape: Shape, recovery: Recovery, faults: list[Fault], left_out: int) -> None:
    fewer = faults[:left_out] + faults[left_out + 1 :]
    without, with_all = (simulate(shape, recovery, some).ratio for some in (fewer, faults))
    assert with_all <= without + 1e-9


@pytest.mark.parametrize("fault", [Fault(0, 0.5), Fault(11, 0.5), Fault(1, 1.1), Fault(1, -0.1)])
def test_a_fault_outside_of_the_run_is_refused(fault: Fault) -> None:
    with pytest.raises(ValueError, match="is not in one of 10 steps"):
        simulate(IN_TURNS, OURS, [fault])


def test_a_fault_of_a_part_without_a_way_is_refused() -> None:
    with pytest.raises(ValueError, match="no way for a lost node"):
        simulate(IN_TURNS, OURS, [Fault(1, 0.5, Part.NODE)])


def test_a_scaled_run_has_steps_of_that_length_and_the_same_shares() -> None:
    scaled = IN_TURNS.scaled(10)
    assert (scaled.rollout, scaled.train, scaled.sync) == pytest.approx((6, 3, 1))
    assert SIDE_BY_SIDE.scaled(10).period == 10


def test_counted_as_robustrl_sync_and_half_of_a_pause_are_no_training_and_repeated_work_is() -> (
    None
):
    shape = bench_ettr_simulated.SHAPE
    undisturbed = simulate(shape, KEEPS)
    count = bench_ettr_simulated.counted_as_robustrl
    assert count([undisturbed]) == pytest.approx(1 - shape.sync / shape.period)
    disturbed = simulate(shape, KEEPS, [Fault(6, 0.9)])
    assert disturbed.down == 5
    again = disturbed.trained * shape.sync / (shape.train + shape.sync)
    assert count([disturbed]) == pytest.approx(1 - (again + 2.5) / disturbed.total)


def test_equal_seeds_draw_equal_faults_and_others_others() -> None:
    def drawn(seed: int) -> list[Fault]:
        return list(draw(seed, 100, tuple(Part)))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    first, again = (simulate(Shape(), recoveries.trainsync(5, 20), drawn(1)) for _ in range(2))
    assert first == again


def test_one_fault_strikes_in_every_ten_steps_whichever_parts_may_be_lost() -> None:
    trainers, mixed = list(draw(1, 100)), list(draw(1, 100, tuple(Part)))
    assert [(fault.step - 1) // 10 for fault in trainers] == list(range(10))
    assert {fault.part for fault in trainers} == {Part.TRAINER}
    assert len({fault.part for fault in mixed}) > 1
    assert [(f.step, f.at) for f in mixed] == [(f.step, f.at) for f in trainers]


def test_a_run_that_ends_amid_ten_steps_has_no_fault_after_its_end() -> None:
    assert all(fault.step <= 11 for seed in range(50) for fault in draw(seed, 11))
