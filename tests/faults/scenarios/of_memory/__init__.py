"""Scenarios of checkpoints that are kept in memory; `tests.faults.memory` has their processes."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_memory import ranks

OF_MEMORY: tuple[Scenario, ...] = (*ranks.SCENARIOS,)
