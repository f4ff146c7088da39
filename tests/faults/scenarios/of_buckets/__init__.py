"""Scenarios of runs in a bucket; `tests.faults.in_bucket` has their processes."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_buckets import answers, attempts, killed, weights

OF_BUCKETS: tuple[Scenario, ...] = (
    *answers.SCENARIOS,
    *killed.SCENARIOS,
    *attempts.SCENARIOS,
    *weights.SCENARIOS,
)
