"""What each style decides, as a table. That it never dead-locks is in test_policy_simulation."""

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing.policy import (
    ExplorerMove,
    ExplorerView,
    RunView,
    SyncPolicy,
    TrainerMove,
    admits,
    explorer_move,
    trainer_move,
    version_for,
)
from trainsync.weights.synchronizer.roster import LOST, REQUIRE_SYNC, STOPPED

FETCH, ROLL_OUT, WAIT = ExplorerMove.FETCH, ExplorerMove.ROLL_OUT, ExplorerMove.WAIT

FIXED = SyncPolicy(SyncStyle.FIXED)
FIXED_2 = SyncPolicy(SyncStyle.FIXED, interval=2)
AHEAD = SyncPolicy(SyncStyle.FIXED, interval=2, offset=1)
BY_TRAINER = SyncPolicy(SyncStyle.TRAINER_DRIVEN, interval=2)
BY_EXPLORER = SyncPolicy(SyncStyle.EXPLORER_DRIVEN, interval=2)
ASYNC = SyncPolicy(SyncStyle.FULLY_ASYNC, max_staleness=1, timeout=50.0)
ALL = [FIXED, FIXED_2, AHEAD, BY_TRAINER, BY_EXPLORER, ASYNC]


def upload(policy: SyncPolicy, run: RunView) -> bool:
    return trainer_move(policy, run).upload


@pytest.mark.parametrize("policy", ALL)
def test_the_first_version_is_published_and_taken_at_once_whatever_the_style(
    policy: SyncPolicy,
) -> None:
    new = {"e": ExplorerView(next_step=8)}
    assert trainer_move(policy, RunView(7, None, new)) == TrainerMove(upload=True)
    assert explorer_move(policy, RunView(7, None, new), "e") == WAIT
    assert explorer_move(policy, RunView(7, 7, new), "e") == FETCH
    has = {"e": ExplorerView(version=7, next_step=8)}
    assert explorer_move(policy, RunView(7, 7, has), "e") == ROLL_OUT


@pytest.mark.parametrize("policy", ALL)
def test_when_the_trainer_has_stopped_explorers_stop(policy: SyncPolicy) -> None:
    run = RunView(7, 6, {"e": ExplorerView(6)}, stopped=True)
    assert explorer_move(policy, run, "e") == ExplorerMove.STOP


@pytest.mark.parametrize(
    ("policy", "step", "published", "expected"),
    [
        (FIXED, 5, 4, True),
        (FIXED, 5, 5, False),
        (FIXED_2, 5, 4, False),
        (FIXED_2, 6, 4, True),
        (FIXED_2, 6, 5, True),  # resumed at step 5
        (BY_TRAINER, 5, 4, False),
        (BY_TRAINER, 6, 4, True),
        (BY_TRAINER, 6, 6, False),
        (BY_EXPLORER, 6, 4, False),  # no explorer asked
        (ASYNC, 6, 5, True),
    ],
)
def test_when_the_trainer_publishes(
    policy: SyncPolicy, step: int, published: int, expected: bool
) -> None:
    assert upload(policy, RunView(step, published)) == expected


@pytest.mark.parametrize(
    ("next_step", "version", "published", "expected"),
    [
        (5, 4, 4, ROLL_OUT),
        (6, 4, 4, ROLL_OUT),  # for step 6 it needs the version of step 4 or 5
        (7, 4, 4, WAIT),
        (7, 4, 6, FETCH),
        (7, 6, 6, ROLL_OUT),
        (6, 4, 6, ROLL_OUT),  # not before its turn
        (9, 4, 6, FETCH),  # on the way to version 8
    ],
)
def test_fixed_takes_each_version_when_its_turn_comes(
    next_step: int, version: int, published: int, expected: ExplorerMove
) -> None:
    run = RunView(6, published, {"e": ExplorerView(version, next_step=next_step)})
    assert explorer_move(FIXED_2, run, "e") == expected


def test_fixed_with_an_offset_runs_ahead_by_that_many_steps() -> None:
    assert [version_for(FIXED_2, step) for step in (3, 4, 5, 6, 7)] == [2, 2, 4, 4, 6]
    assert [version_for(AHEAD, step) for step in (3, 4, 5, 6, 7)] == [0, 2, 2, 4, 4]
    assert version_for(AHEAD, 1) < 0


@pytest.mark.parametrize(
    ("explorer", "expected"),
    [
        (ExplorerView(4), TrainerMove(upload=True)),
        (ExplorerView(2), TrainerMove(wait_for=frozenset("e"), seconds=600.0)),
        (ExplorerView(2, REQUIRE_SYNC), TrainerMove(wait_for=frozenset("e"), seconds=600.0)),
        (ExplorerView(2, LOST), TrainerMove(upload=True)),
        (ExplorerView(2, STOPPED), TrainerMove(upload=True)),
    ],
)
def test_fixed_replaces_a_version_only_when_every_live_explorer_has_it(
    explorer: ExplorerView, expected: TrainerMove
) -> None:
    assert trainer_move(FIXED_2, RunView(6, 4, {"e": explorer, "ok": ExplorerView(4)})) == expected


@pytest.mark.parametrize("policy", [FIXED_2, ASYNC])
def test_an_explorer_past_its_timeout_is_given_up(policy: SyncPolicy) -> None:
    explorers = {"slow": ExplorerView(4, rolling_out=True), "ok": ExplorerView(6)}
    published = 5 if policy is FIXED_2 else 6
    run = RunView(6, published, explorers, queued=(6,))
    waiting = trainer_move(policy, run, waited=10.0)
    assert waiting == TrainerMove(wait_for=frozenset({"slow"}), seconds=policy.timeout - 10.0)
    assert trainer_move(policy, run, policy.timeout) == TrainerMove(give_up=frozenset({"slow"}))


@pytest.mark.parametrize(
    ("rollouts", "version", "expected"),
    [(1, 4, FETCH), (0, 4, ROLL_OUT), (3, 6, ROLL_OUT)],
)
def test_trainer_driven_takes_the_newest_but_uses_each_at_least_once(
    rollouts: int, version: int, expected: ExplorerMove
) -> None:
    run = RunView(7, 6, {"e": ExplorerView(version, rollouts=rollouts)})
    assert explorer_move(BY_TRAINER, run, "e") == expected


@pytest.mark.parametrize(
    ("rollouts", "version", "published", "expected"),
    [
        (1, 4, 6, ROLL_OUT),
        (2, 4, 6, FETCH),
        (2, 4, 4, WAIT),
        (9, 7, 7, ROLL_OUT),  # there is nothing newer, and only its batches can make it
    ],
)
def test_explorer_driven_asks_after_its_share_of_batches(
    rollouts: int, version: int, published: int, expected: ExplorerMove
) -> None:
    run = RunView(7, published, {"e": ExplorerView(version, rollouts=rollouts)})
    assert explorer_move(BY_EXPLORER, run, "e") == expected


@pytest.mark.parametrize(
    ("explorer", "expected"),
    [
        (ExplorerView(4, REQUIRE_SYNC), True),
        (ExplorerView(2, REQUIRE_SYNC), False),  # it can have version 4
        (ExplorerView(4), False),
        (ExplorerView(4, LOST), False),
    ],
)
def test_explorer_driven_publishes_when_asked(explorer: ExplorerView, expected: bool) -> None:
    assert upload(BY_EXPLORER, RunView(7, 4, {"e": explorer})) == expected
    assert not upload(BY_EXPLORER, RunView(4, 4, {"e": explorer})), "it has nothing newer"


@pytest.mark.parametrize(
    ("version", "published", "queued", "training", "rollouts", "expected"),
    [
        (6, 6, (), False, 5, ROLL_OUT),
        (6, 6, (6,), False, 5, ROLL_OUT),
        (6, 6, (6, 6), False, 5, WAIT),  # it would be trained on in step 9, two steps old
        (6, 6, (6,), True, 5, WAIT),
        (5, 6, (), False, 1, FETCH),
        (5, 6, (), False, 0, ROLL_OUT),
        (5, 6, (6,), False, 0, ROLL_OUT),  # its turn is before the other's
        (4, 6, (), False, 0, FETCH),
        (5, 6, (5,), False, 0, FETCH),
    ],
)
def test_fully_async_begins_only_batches_that_can_be_used_in_time(
    version: int,
    published: int,
    queued: tuple[int, ...],
    training: bool,
    rollouts: int,
    expected: ExplorerMove,
) -> None:
    explorer = ExplorerView(version, rollouts=rollouts)
    run = RunView(6, published, {"e": explorer}, training=training, queued=queued)
    assert explorer_move(ASYNC, run, "e") == expected
    assert admits(ASYNC, run, version) == (expected == ROLL_OUT or (rollouts == 1))


@pytest.mark.parametrize(
    ("making", "queued", "held_up"),
    [
        (6, (6,), False),
        (5, (6,), True),  # in step 8 it would be two steps old
        (5, (), False),  # there is nothing to train on anyway
        (5, (5,), True),
    ],
)
def test_fully_async_waits_for_a_batch_that_would_come_too_late(
    making: int, queued: tuple[int, ...], held_up: bool
) -> None:
    run = RunView(6, 6, {"e": ExplorerView(making, rolling_out=True)}, queued=queued)
    assert trainer_move(ASYNC, run).wait_for == (frozenset("e") if held_up else frozenset())
    lost = RunView(6, 6, {"e": ExplorerView(making, LOST, rolling_out=True)}, queued=queued)
    assert trainer_move(ASYNC, lost) == TrainerMove()


def test_several_batches_a_step_make_room_for_as_many() -> None:
    policy = SyncPolicy(SyncStyle.FULLY_ASYNC, max_staleness=0, batches_per_step=3)
    run = RunView(6, 6, {"e": ExplorerView(6, rollouts=2)}, queued=(6, 6))
    assert explorer_move(policy, run, "e") == ROLL_OUT
    full = RunView(6, 6, {"e": ExplorerView(6, rollouts=2)}, queued=(6, 6, 6))
    assert explorer_move(policy, full, "e") == WAIT


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"style": SyncStyle.FIXED, "interval": 0}, "at least 1"),
        ({"style": SyncStyle.FIXED, "offset": 2}, "between 0 and interval"),
        ({"style": SyncStyle.TRAINER_DRIVEN, "offset": 1}, "and 0 with any other"),
        ({"style": SyncStyle.FIXED, "max_staleness": 1}, "for style fully_async only"),
        ({"style": SyncStyle.EXPLORER_DRIVEN, "batches_per_step": 2}, "fully_async only"),
        ({"style": SyncStyle.FULLY_ASYNC}, "max_staleness is None"),
        ({"style": SyncStyle.FULLY_ASYNC, "interval": 3, "max_staleness": 1}, "= 2"),
        ({"style": SyncStyle.FULLY_ASYNC, "max_staleness": 1, "batches_per_step": 0}, "least 1"),
        ({"style": SyncStyle.FIXED, "timeout": 0.0}, "timeout must be positive"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SyncPolicy(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ALL)
def test_the_weights_of_a_step_whose_save_was_aborted_are_not_published_again(
    policy: SyncPolicy,
) -> None:
    asks = {"e": ExplorerView(4, REQUIRE_SYNC, rollouts=9, next_step=7)}
    assert upload(policy, RunView(6, 4, asks))
    assert not upload(policy, RunView(6, 4, asks, aborted=[6]))
    assert upload(policy, RunView(8, 4, asks, aborted=[6])), "the next one may be had"


@pytest.mark.parametrize(
    ("policy", "run", "expected"),
    [
        # With version 6 aborted, the batches that it was meant for are made with the one before.
        (FIXED_2, RunView(6, 4, {"e": ExplorerView(4, next_step=7)}), WAIT),
        (FIXED_2, RunView(6, 4, {"e": ExplorerView(4, next_step=7)}, aborted=[6]), ROLL_OUT),
        (FIXED_2, RunView(6, 4, {"e": ExplorerView(2, next_step=7)}, aborted=[6]), FETCH),
        (FIXED_2, RunView(8, 4, {"e": ExplorerView(4, next_step=9)}, aborted=[6]), WAIT),
        (FIXED_2, RunView(8, 4, {"e": ExplorerView(4, next_step=9)}, aborted=[6, 8]), ROLL_OUT),
        (FIXED_2, RunView(8, 8, {"e": ExplorerView(4, next_step=8)}, aborted=[6]), ROLL_OUT),
        # It had its share, and there is nothing newer until the next step is trained.
        (BY_EXPLORER, RunView(6, 4, {"e": ExplorerView(4, rollouts=2)}), WAIT),
        (BY_EXPLORER, RunView(6, 4, {"e": ExplorerView(4, rollouts=2)}, aborted=[6]), ROLL_OUT),
        (BY_EXPLORER, RunView(6, 4, {"e": ExplorerView(2, rollouts=2)}, aborted=[6]), FETCH),
        (BY_EXPLORER, RunView(7, 4, {"e": ExplorerView(4, rollouts=2)}, aborted=[6]), WAIT),
        # One step beyond K for each aborted version in a row, for one step's batches.
        (ASYNC, RunView(6, 4, {"e": ExplorerView(4)}), WAIT),
        (ASYNC, RunView(6, 4, {"e": ExplorerView(4)}, aborted=[5, 6]), ROLL_OUT),
        (ASYNC, RunView(6, 4, {"e": ExplorerView(4)}, aborted=[5, 6], queued=(4,)), WAIT),
        (ASYNC, RunView(6, 4, {"e": ExplorerView(4)}, aborted=[5, 6], training=True), WAIT),
        (ASYNC, RunView(6, 4, {"e": ExplorerView(4)}, aborted=[5]), WAIT),
        (BY_TRAINER, RunView(6, 4, {"e": ExplorerView(4, rollouts=5)}, aborted=[6]), ROLL_OUT),
    ],
)
def test_what_an_explorer_does_without_a_version_that_was_aborted(
    policy: SyncPolicy, run: RunView, expected: ExplorerMove
) -> None:
    assert explorer_move(policy, run, "e") == expected


def test_fully_async_makes_up_for_an_aborted_version_after_the_next_step() -> None:
    policy = SyncPolicy(SyncStyle.FULLY_ASYNC, interval=3, max_staleness=4)
    assert not upload(policy, RunView(7, 3))
    assert upload(policy, RunView(7, 3, aborted=[6]))
    assert not upload(policy, RunView(8, 7, aborted=[6])), "it is made up for"
