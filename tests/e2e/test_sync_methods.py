"""The example with another method and style of weight sync, set only in the TrainingRun.

`test_bucket` has the method `nccl`, and `test_restore_from_memory` has `memory`.
"""

import pytest

from demo.platform import Platform
from tests.e2e import example

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS, METHOD = 12, "checkpoint"
SYNC = {"method": METHOD, "style": "trainer_driven", "interval": 2, "timeoutSeconds": 60}


def test_the_example_runs_to_its_end_and_explorers_compute_what_the_trainer_does(
    platform: Platform,
) -> None:
    run = example.start(platform, f"sync-{METHOD}", STEPS, sync=SYNC)
    try:
        end = run.wait_complete(300)
        assert end.restarts == 0
        example.check_explorers(run, end, METHOD, STEPS)
        example.check_volume(run, STEPS)
    finally:
        run.delete()
