"""The boost of a run's priority: the run with the least at risk is the first to be preempted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.status import Phase
from trainsync_operator.reconcile.decide.preemption_cost import BoostScale, priority_boost

SCALE = BoostScale(highest=9, unit=600)


def status(phase: str, gpu_seconds: int, seconds: int = 1) -> dict[str, Any]:
    return {"phase": phase, "atRisk": {"steps": 1, "seconds": seconds, "gpuSeconds": gpu_seconds}}


@pytest.mark.parametrize(
    ("gpu_seconds", "boost"), [(0, 0), (599, 0), (600, 1), (1800, 2), (4200, 3), (10**9, 9)]
)
def test_each_doubling_of_what_is_at_risk_is_one_more(gpu_seconds: int, boost: int) -> None:
    assert priority_boost(status("Running", gpu_seconds, seconds=0), SCALE) == boost


def test_seconds_count_where_no_gpu_is_asked_for() -> None:
    assert priority_boost(status("Running", 0, seconds=1800), SCALE) == 2


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
def test_only_a_run_that_trains_is_boosted(phase: Phase) -> None:
    assert priority_boost(status(phase, 10**9), SCALE) == 0


def test_a_run_of_which_nothing_is_known_is_not_boosted() -> None:
    assert priority_boost({}, SCALE) == 0
    assert priority_boost({"phase": "Running", "atRisk": None}, SCALE) == 0


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_at_risk_is_never_cheaper(one: int, other: int, highest: int, unit: int) -> None:
    scale = BoostScale(highest, unit)
    low, high = (priority_boost(status("Running", cost), scale) for cost in sorted((one, other)))
    assert 0 <= low <= high <= highest
