"""The example with other methods and styles of weight sync, set only in the TrainingRun.

`test_restore_from_memory` has the method `memory`.
"""

from typing import Any

import pytest

from demo.platform import Platform
from tests.e2e import example

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12
SYNCS: dict[str, dict[str, Any]] = {
    "nccl": {"style": "explorer_driven", "interval": 2},
    "checkpoint": {"style": "trainer_driven", "interval": 2},
}


@pytest.mark.parametrize("method", SYNCS)
def test_the_example_runs_to_its_end_and_explorers_compute_what_the_trainer_does(
    method: str, platform: Platform
) -> None:
    sync = {"method": method, "timeoutSeconds": 60, **SYNCS[method]}
    run = example.start(platform, f"sync-{method}", STEPS, sync=sync)
    try:
        end = run.wait_complete(300)
        assert end.restarts == 0
        example.check_explorers(run, end, method, STEPS)
    finally:
        run.delete()
