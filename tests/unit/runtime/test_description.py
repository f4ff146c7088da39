"""Steps at which a periodic action is due."""

import pytest
from trainsync.runtime.description import is_due


@pytest.mark.parametrize(
    ("step", "interval", "last", "due"),
    [
        (0, 1, None, False),
        (0, 1, 0, False),
        (1, 1, None, True),
        (4, 5, None, False),
        (5, 5, None, True),
        (10, 5, 12, True),
        (11, 5, 12, False),
        (12, 5, 12, True),
        (13, 5, 12, False),
    ],
)
def test_it_is_due_every_interval_and_at_the_last(
    step: int, interval: int, last: int | None, due: bool
) -> None:
    assert is_due(step, interval, last) is due


def test_an_interval_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="interval must be at least 1"):
        is_due(1, 0)
