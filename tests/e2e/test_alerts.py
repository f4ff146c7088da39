"""A hung training makes an alert fire in a real Prometheus; progress resolves the alert."""

from collections.abc import Callable
from pathlib import Path

import pytest

from demo import faults
from demo.kubectl import wait_for
from monitoring.rules import Pace
from tests.e2e.harness import NAMESPACE, Run
from tests.e2e.watching import watching

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

# Scales 15 minutes to 9 seconds.
PACE = Pace(100)


def test_a_training_that_hangs_fires_an_alert_until_it_goes_on(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("hangs", "--steps", "1000", "--trainers", "1", trainers=1)
    with watching(run.kubectl, run.name, tmp_path, PACE) as prometheus:

        def fires() -> bool:
            found = prometheus.firing().get("TrainsyncRunStalled", [])
            return [(alert["namespace"], alert["run"]) for alert in found] == [
                (NAMESPACE, run.name)
            ]

        run.wait(lambda now, _: (now.step or 0) >= 5, "it trains", 240)
        wait_for(
            lambda: bool(prometheus.query("trainsync_run_step > 0")), what="a scrape", seconds=60
        )
        (head,) = faults.pods_of(run.kubectl, run.name, NAMESPACE, "Head")
        pod = head["metadata"]["name"]
        run.kubectl.exec(pod, NAMESPACE, "pkill", "-STOP", "-f", "workload.py")
        wait_for(fires, what="the alert fires", seconds=90)
        run.kubectl.exec(pod, NAMESPACE, "pkill", "-CONT", "-f", "workload.py")
        wait_for(lambda: not fires(), what="the alert ends", seconds=60)
