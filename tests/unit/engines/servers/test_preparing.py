"""A server is prepared once all of its workers are."""

from typing import Any

import pytest
from trainsync.engines.servers.preparing import PreparationOutcome, of_all, told

_DONE = told(PreparationOutcome.PREPARED)
_FULL = told(PreparationOutcome.NO_MEMORY, "full")


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([_DONE, _DONE], (PreparationOutcome.PREPARED, "")),
        ([_DONE, told(None)], None),
        ([told(None), _FULL], (PreparationOutcome.NO_MEMORY, "full")),
        ([_DONE, _FULL], (PreparationOutcome.NO_MEMORY, "full")),
    ],
)
def test_the_outcome_is_that_of_all(answers: list[Any], wanted: object) -> None:
    assert of_all(answers) == wanted


@pytest.mark.parametrize("answers", [[], ["done"], [None], [{"outcome": "prepared"}], [
    {"outcome": "unheard of", "reason": ""}]])  # fmt: skip
def test_other_answers_are_refused(answers: list[Any]) -> None:
    with pytest.raises(ValueError):
        of_all(answers)
