"""When a figure meets its goal."""

import pytest

from tests.bench.harness import Figure


@pytest.mark.parametrize(
    ("goal", "met"), [("<= 2", True), ("<= 1.9", False), (">= 2", True), (">= 2.1", False)]
)
def test_a_goal_is_a_bound(goal: str, met: bool) -> None:
    assert Figure("name", 2.0, "s", goal, "peer").met is met


def test_a_figure_without_a_goal_misses_none() -> None:
    assert Figure("name", 2.0, "s", "-", "peer").met


def test_a_goal_that_is_no_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="name: goal '< 2' must be -, or start with <= or >="):
        _ = Figure("name", 2.0, "s", "< 2", "peer").met
