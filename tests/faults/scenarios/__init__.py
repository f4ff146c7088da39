"""Every scenario, by name."""

from tests.faults.scenario import Scenario
from tests.faults.scenarios import (
    agents,
    attempts,
    clocks,
    disks,
    endings,
    followed,
    hints,
    monitors,
    near_receivers,
    networks,
    preemptions,
    receivers,
    servers,
    walks,
    writers,
)

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
        agents,
        servers,
        followed,
    )
    for scenario in module.SCENARIOS
}
