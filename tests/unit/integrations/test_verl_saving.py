"""How verl's workers save, by their environment."""

import pytest
from trainsync.integrations.verl.saving import SavingOptions


def test_the_environment_says_how_to_save() -> None:
    assert SavingOptions.from_env({}) == SavingOptions(overlapped=False, when_full="wait")
    said = {"TRAINSYNC_VERL_OVERLAPPED": "true", "TRAINSYNC_VERL_WHEN_FULL": "skip"}
    assert SavingOptions.from_env(said) == SavingOptions(overlapped=True, when_full="skip")


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("TRAINSYNC_VERL_OVERLAPPED", "yes", "TRAINSYNC_VERL_OVERLAPPED is 'yes'; expected true"),
        ("TRAINSYNC_VERL_WHEN_FULL", "drop", "TRAINSYNC_VERL_WHEN_FULL is 'drop'; expected wait"),
    ],
)
def test_a_value_that_is_none_is_refused(variable: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SavingOptions.from_env({variable: value})
