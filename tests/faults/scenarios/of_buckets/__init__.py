"""Scenarios of runs in a bucket; `tests.faults.in_bucket` has their processes."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_buckets import killed

OF_BUCKETS: tuple[Scenario, ...] = (*killed.SCENARIOS,)
