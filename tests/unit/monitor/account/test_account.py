"""The account of simulated runs, against what is known of them exactly."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from trainsync.api.protocol import ProgressReport, RolloutSeconds, SaveKind, WeightsReport
from trainsync.api.spec import Role
from trainsync.api.status import AccountClass, AccountUnit, Phase, RolePods
from trainsync.monitor.account.account import OF_ROLE, Account

from tests.unit.monitor.account.schedule import (
    START,
    Shape,
    Trouble,
    check,
    misplaced,
    play,
    sum_error,
    watch,
)

EXACT = Trouble(longest_delay=0.0, look_seconds=0.2)
SHORT = Shape(attempts=3, steps=(5, 12), step_seconds=(2.0, 9.0))
MANY = {role: RolePods(role=role.value, held=2, held_gpus=16) for role in Role}


def test_without_trouble_each_second_is_in_its_class() -> None:
    draw = random.Random(1)
    run = play(draw, SHORT)
    account = watch(run, SHORT, draw, EXACT)
    for role in Role:
        assert sum_error(run, account, role) < 1e-3
        assert misplaced(run, account, role) < 2e-3, account.roles[role].seconds


def test_a_step_that_was_reported_before_is_a_repeat_and_no_other() -> None:
    draw = random.Random(2)
    shape = Shape(attempts=4, steps=(8, 15), step_seconds=(10.0, 10.0))
    run = play(draw, shape)
    assert run.again > 3
    seconds = watch(run, shape, draw, EXACT).roles[Role.TRAINER].seconds
    truth = run.truth[Role.TRAINER]
    assert abs(seconds[AccountClass.REPEAT] / truth[AccountClass.REPEAT] - 1) < 1e-3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    paced=st.booleans(),
    lost=st.floats(0.0, 0.5),
    doubled=st.floats(0.0, 0.5),
    delay=st.floats(0.0, 60.0),
    lives=st.one_of(st.none(), st.floats(120.0, 3600.0)),
)
def test_lost_late_and_doubled_messages_and_new_monitors_leave_the_sum_as_it_is(
    seed: int, paced: bool, lost: float, doubled: float, delay: float, lives: float | None
) -> None:
    draw = random.Random(seed)
    shape = Shape(paced=paced, steps=(10, 30))
    run = play(draw, shape)
    trouble = Trouble(lost, doubled, delay, monitor_lives=lives)
    account = watch(run, shape, draw, trouble)
    for role in Role:
        assert sum_error(run, account, role) < 0.01


_reports = st.tuples(
    st.integers(0, 3), st.integers(0, 40), st.one_of(st.none(), st.floats(0, 500)),
    st.one_of(st.none(), st.floats(0, 900)),
)  # fmt: skip
_rollouts = st.tuples(
    st.integers(0, 3), st.sampled_from(["clock001", "clock002"]), st.floats(0, 500),
    st.floats(0, 3000), st.floats(0, 3000), st.floats(0, 3000),
)  # fmt: skip
_pods = st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(Phase))
_blocked = st.floats(0, 100)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 90), st.one_of(_reports, _rollouts, _pods, _blocked)), max_size=40
    )
)
def test_whatever_is_told_in_whatever_order_each_second_is_in_one_class(
    told: list[tuple[float, tuple[object, ...] | float]],
) -> None:
    account = Account.begin("uid", AccountUnit.GPU, START)
    now, held, waiting, expected = START, 0, 0, 0.0
    for seconds, what in told:
        now += seconds
        expected += (held + waiting) * seconds
        _tell(account, what, now)
        if isinstance(what, tuple) and len(what) == 3:
            held, waiting = what[0], what[1]  # type: ignore[assignment]
        check(account)
    account.see_pods(_of(held, waiting), Phase.COMPLETE, now)
    for role in Role:
        ledger = account.roles[role]
        assert ledger.until == now
        # Unix time as a float is exact to 0.2 µs.
        assert abs(ledger.total - expected) <= 1e-4 + 1e-6 * expected


def _of(held: int, waiting: int) -> dict[Role, RolePods]:
    return {
        role: RolePods(role=role.value, held=1, held_gpus=held, waiting_gpus=waiting)
        for role in Role
    }


def _tell(account: Account, what: object, now: float) -> None:
    match what:
        case (int(held), int(waiting), Phase() as phase):
            account.see_pods(_of(held, waiting), phase, now)
        case (int(attempt), int(step), loop, waited):
            report = ProgressReport(step=step, loop_seconds=loop, waited_seconds=waited)
            account.trained(attempt, report, now)
        case (int(attempt), str(clock), loop, present, used, unused):
            rollouts = RolloutSeconds(
                clock=clock, loop=loop, present=present, used=used, unused=unused
            )
            report_ = WeightsReport(trainer_version=1, method="nccl", rollouts=rollouts)
            account.synchronized(attempt, report_, now)
        case float(blocked):
            account.saved(SaveKind.CHECKPOINT, blocked)
        case _:
            raise AssertionError(what)


def test_a_report_that_was_late_does_not_move_the_steps_after_it() -> None:
    account = Account.begin("uid", AccountUnit.GPU, START)
    account.see_pods(MANY, Phase.RUNNING, START)
    account.told_resume(0, 0)
    for step, late in ((1, 0.0), (2, 7.0), (3, 0.0)):
        report = ProgressReport(step=step, loop_seconds=10.0 * step, waited_seconds=0.0)
        account.trained(0, report, START + 10.0 * step + late)
        assert account.roles[Role.TRAINER].until == START + 10.0 * step


def test_reports_of_an_older_library_are_read() -> None:
    account = Account.begin("uid", AccountUnit.GPU, START)
    account.see_pods(MANY, Phase.RUNNING, START)
    for step in (1, 2, 3):
        report = ProgressReport.model_validate({"step": step})
        account.trained(0, report, START + 10.0 * step)
    found = account.shown()
    assert found is not None
    trainers, explorers = found.roles
    # When its loop began is not known: the first step counts to the start.
    assert trainers.classes["restart"] == 160
    assert trainers.classes["train"] == 320
    assert explorers.classes["idle"] == 320
    assert found.goodput == round(320 / 960, 4)


def test_publications_without_a_pace_are_told_by_their_receipts() -> None:
    account = Account.begin("uid", AccountUnit.GPU, START)
    account.see_pods(MANY, Phase.RUNNING, START)
    account.trained(0, ProgressReport(step=1), START + 10)
    account.saved(SaveKind.STATE_DICT, 2.0)
    account.trained(0, ProgressReport(step=2), START + 20)
    assert account.roles[Role.TRAINER].seconds[AccountClass.SYNC] == 32.0


def test_a_run_without_gpus_counts_pods() -> None:
    account = Account.begin("uid", AccountUnit.POD, START)
    pods = {Role.TRAINER: RolePods(role="Trainer", held=3)}
    account.see_pods(pods, Phase.RUNNING, START)
    account.trained(0, ProgressReport(step=1, loop_seconds=10.0), START + 10)
    found = account.shown()
    assert found is not None
    assert (found.unit, [role.role for role in found.roles]) == (AccountUnit.POD, ["Trainer"])
    assert found.roles[0].seconds == 30


def test_every_class_can_be_filled_and_the_sum_shown_is_that_of_the_classes() -> None:
    draw = random.Random(3)
    shape = Shape()
    account = watch(play(draw, shape), shape, draw, Trouble())
    found = account.shown()
    assert found is not None
    for role, kinds in OF_ROLE.items():
        shown = next(entry for entry in found.roles if entry.role == role.value)
        assert set(shown.classes) == {kind.value for kind in kinds}
        assert all(shown.classes.values()), shown
        assert sum(shown.classes.values()) == shown.seconds


def test_the_record_is_read_as_it_was_written() -> None:
    draw = random.Random(4)
    account = watch(play(draw, SHORT), SHORT, draw, Trouble())
    record = TypeAdapter(Account)
    assert record.validate_json(record.dump_json(account, by_alias=True)) == account
