"""Which step goes to the mirror next, and which stay there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.monitor.mirror.decision import next_step, to_remove

STEPS = st.sets(st.integers(0, 60), max_size=20)
EVERY = st.one_of(st.none(), st.integers(1, 20))


@pytest.mark.parametrize(
    ("committed", "mirrored", "every", "step"),
    [
        ([], [], None, None),
        ([10, 20, 30], [], None, 30),
        ([10, 20, 30], [30], None, None),
        ([10, 20, 30], [10], None, 30),
        ([10, 20, 30, 40], [], 20, 20),
        ([10, 20, 30, 40], [20], 20, 40),
        ([10, 20, 30, 40], [20, 40], 20, None),
        ([10, 20, 30], [40], None, None),
    ],
    ids=["none", "first", "there", "newest", "lasting", "next", "all", "older"],
)
def test_lasting_steps_come_first_and_then_the_newest(
    committed: list[int], mirrored: list[int], every: int | None, step: int | None
) -> None:
    assert next_step(committed, mirrored, every) == step


@given(STEPS, STEPS, EVERY, STEPS)
def test_after_some_copies_the_newest_and_all_lasting_steps_are_there(
    committed: set[int], mirrored: set[int], every: int | None, refused: set[int]
) -> None:
    wanted = committed - refused
    there = set(mirrored)
    for _ in range(len(committed) + 1):
        step = next_step(committed, there, every, refused)
        if step is None:
            break
        assert step in wanted - there
        there.add(step)
    assert next_step(committed, there, every, refused) is None
    if wanted:
        assert max(there) >= max(wanted)
    if every is not None:
        assert {step for step in wanted if step % every == 0} <= there


def test_lasting_steps_are_not_removed() -> None:
    assert to_remove([10, 20, 30], 20) == [10, 30]
    assert to_remove([10, 20, 30], None) == [10, 20, 30]
