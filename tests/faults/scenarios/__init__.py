"""Every scenario, by name."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios import (
    attempts,
    clocks,
    disks,
    endings,
    hints,
    monitors,
    near_receivers,
    networks,
    preemptions,
    receivers,
    walks,
    writers,
)
from tests.faults.scenarios.of_buckets import OF_BUCKETS
from tests.faults.scenarios.of_memory import OF_MEMORY
from tests.faults.scenarios.of_servers import OF_SERVERS

ALL: dict[str, Scenario] = {
    scenario.name: scenario
    for module in (
        writers,
        monitors,
        disks,
        walks,
        clocks,
        hints,
        networks,
        attempts,
        endings,
        preemptions,
        receivers,
        near_receivers,
    )
    for scenario in module.SCENARIOS
} | {scenario.name: scenario for scenario in (*OF_BUCKETS, *OF_MEMORY, *OF_SERVERS)}
