"""How verl's workers save, by their environment."""

import pytest
from trainsync.integrations.verl.saving import SaveSettings


def test_the_environment_says_how_to_save() -> None:
    assert SaveSettings.from_env({}) == SaveSettings(overlapped=False, when_full="wait")
    said = {"TRAINSYNC_VERL_OVERLAPPED": "true", "TRAINSYNC_VERL_WHEN_FULL": "skip"}
    assert SaveSettings.from_env(said) == SaveSettings(overlapped=True, when_full="skip")


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("TRAINSYNC_VERL_OVERLAPPED", "yes", "TRAINSYNC_VERL_OVERLAPPED is 'yes'; expected true"),
        ("TRAINSYNC_VERL_WHEN_FULL", "drop", "TRAINSYNC_VERL_WHEN_FULL is 'drop'; expected wait"),
    ],
)
def test_a_value_that_is_none_is_refused(variable: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SaveSettings.from_env({variable: value})
