"""What explorers' time is counted as."""

from hypothesis import given
from hypothesis import strategies as st
from trainsync.weights.pacing.rollout_clock import RolloutClock


def told(clock: RolloutClock) -> tuple[float, float, float, float]:
    report = clock.report()
    assert report is not None
    return report.loop, report.present, report.used, report.unused


def test_nothing_is_told_before_an_explorer_takes_part() -> None:
    clock = RolloutClock()
    clock.see([], [], 5.0)
    assert clock.report() is None


def test_a_batch_counts_once_training_on_it_begins() -> None:
    clock = RolloutClock()
    clock.see(["a", "b"], [], 0.0)
    clock.turned("a", 1.0)
    clock.delivered(("a", 1), 4.0, taken=True)
    clock.see(["a", "b"], [("a", 1)], 4.0)
    assert told(clock) == (4.0, 8.0, 0.0, 0.0)
    clock.begun([("a", 1)])
    clock.see(["a", "b"], [], 5.0)
    assert told(clock) == (5.0, 10.0, 3.0, 0.0)
    clock.delivered(("a", 1), 6.0, taken=True)  # the same again
    assert told(clock) == (5.0, 10.0, 3.0, 0.0)


def test_rollouts_that_training_has_no_use_for_are_told_apart() -> None:
    clock = RolloutClock()
    clock.see(["a", "b", "c", "d"], [], 0.0)
    for name in ("a", "b", "c", "d"):
        clock.turned(name, 0.0)
    clock.delivered(("a", 1), 1.0, taken=False)
    clock.delivered(("b", 2), 2.0, taken=True)
    clock.see(["a", "b", "c", "d"], [], 3.0)  # the batch of b is dropped from the queue
    clock.see(["a", "b", "d"], [], 4.0)  # c is lost amid its rollout
    clock.turned("d", 8.0)  # and d begins anew
    clock.see(["a", "b", "d"], [], 8.0)
    assert told(clock) == (8.0, 28.0, 0.0, 1.0 + 2.0 + 4.0 + 8.0)


def test_at_the_end_what_is_queued_and_what_comes_yet_is_in_vain() -> None:
    clock = RolloutClock()
    clock.see(["a", "b"], [], 0.0)
    clock.turned("a", 0.0)
    clock.turned("b", 0.0)
    clock.delivered(("a", 1), 2.0, taken=True)
    clock.end()
    clock.delivered(("b", 2), 3.0, taken=True)
    clock.see(["a", "b"], [("b", 2)], 3.0)
    assert told(clock) == (3.0, 6.0, 0.0, 5.0)


def test_batches_after_a_restart_of_trainers_that_had_ended_are_trained_on() -> None:
    clock = RolloutClock()
    clock.see(["a"], [], 0.0)
    clock.end()
    clock.go_on()
    clock.turned("a", 0.0)
    clock.delivered(("a", 1), 2.0, taken=True)
    clock.begun([("a", 1)])
    clock.see(["a"], [], 2.0)
    assert told(clock) == (2.0, 2.0, 2.0, 0.0)


_calls = st.tuples(
    st.sampled_from(["see", "turned", "taken", "refused", "begun", "end"]),
    st.sampled_from("abc"), st.integers(1, 3), st.floats(0, 10),
    st.sets(st.sampled_from("abc")), st.sets(st.tuples(st.sampled_from("abc"), st.integers(1, 3))),
)  # fmt: skip


@given(st.lists(_calls, max_size=40))
def test_used_and_unused_are_never_more_than_explorers_had(calls: list[tuple]) -> None:
    clock, now, present = RolloutClock(), 0.0, set()
    before = 0.0
    for what, name, number, seconds, explorers, queued in calls:
        now += seconds
        clock.see(present, queued, now)
        if what == "see":
            present = explorers
            clock.see(present, queued, now)
        elif what == "turned" and name in present:
            clock.turned(name, now)
        elif what in ("taken", "refused"):
            clock.delivered((name, number), now, taken=what == "taken")
        elif what == "begun":
            clock.begun([(name, number)])
        elif what == "end":
            clock.end()
        if (report := clock.report()) is not None:
            assert report.used + report.unused <= report.present + 0.01
            assert report.used + report.unused >= before - 0.01
            before = report.used + report.unused
