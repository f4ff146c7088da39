"""Scenarios of checkpoints that are kept in memory; `tests.faults.memory` has their processes."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_memory import keepers, kept, ranks

OF_MEMORY: tuple[Scenario, ...] = (
    *ranks.SCENARIOS,
    *keepers.SCENARIOS,
    *kept.SCENARIOS,
)
