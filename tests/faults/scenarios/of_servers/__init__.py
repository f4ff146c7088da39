"""Scenarios of inference servers and their agents; `tests.faults.serving` has their processes."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_servers import agents, fellows, followed, servers

OF_SERVERS: tuple[Scenario, ...] = (
    *agents.SCENARIOS,
    *servers.SCENARIOS,
    *followed.SCENARIOS,
    *fellows.SCENARIOS,
)
