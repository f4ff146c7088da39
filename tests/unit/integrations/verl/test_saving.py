"""How verl's workers save, by their environment."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from trainsync.integrations.verl.saving import SaveSettings, exit_in_order_on_sigterm
from trainsync.runtime.stop.shutdown import NotMainThreadError


def test_the_environment_says_how_to_save() -> None:
    assert SaveSettings.from_env({}) == SaveSettings(overlapped=False, when_full="wait")
    said = {"TRAINSYNC_VERL_OVERLAPPED": "true", "TRAINSYNC_VERL_WHEN_FULL": "skip"}
    assert SaveSettings.from_env(said) == SaveSettings(overlapped=True, when_full="skip")
    graceful = SaveSettings.from_env({"TRAINSYNC_VERL_GRACEFUL_SHUTDOWN": "true"})
    assert graceful == SaveSettings(graceful_shutdown=True)


def test_a_worker_whose_thread_hears_no_signal_is_refused_a_graceful_shutdown() -> None:
    with ThreadPoolExecutor(1) as pool:
        problem = pool.submit(exit_in_order_on_sigterm).exception(10)
    assert isinstance(problem, NotMainThreadError)
    assert "TRAINSYNC_VERL_GRACEFUL_SHUTDOWN is true" in str(problem)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("TRAINSYNC_VERL_OVERLAPPED", "yes", "TRAINSYNC_VERL_OVERLAPPED is 'yes'; expected true"),
        (
            "TRAINSYNC_VERL_GRACEFUL_SHUTDOWN",
            "1",
            "TRAINSYNC_VERL_GRACEFUL_SHUTDOWN is '1'; expected true",
        ),
        ("TRAINSYNC_VERL_WHEN_FULL", "drop", "TRAINSYNC_VERL_WHEN_FULL is 'drop'; expected wait"),
    ],
)
def test_a_value_that_is_none_is_refused(variable: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SaveSettings.from_env({variable: value})
