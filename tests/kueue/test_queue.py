"""Runs in a queue of the real Kueue.

Not part of `make test`: `make test-kueue` builds Kueue first. TRAINSYNC_PREEMPTIONS says how often
the second test preempts its run.
"""

import os
import time
from collections.abc import Iterator

import pytest

from demo.platform import Platform
from tests.e2e.harness import NAMESPACE, assert_one_training_at_a_time
from tests.kueue import queue
from tests.kueue.queue import HIGH, LOW, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

PREEMPTIONS = int(os.environ.get("TRAINSYNC_PREEMPTIONS", "3"))


@pytest.fixture(scope="module")
def queued(platform: Platform) -> Iterator[Platform]:
    queue.prepare(platform)
    yield platform
    for kind in ("trainingruns", "workloads.kueue.x-k8s.io"):
        platform.kubectl.run("-n", NAMESPACE, "delete", kind, "--all", timeout=180)


def test_of_two_runs_with_room_for_one_the_urgent_one_goes_first_and_no_step_is_lost(
    queued: Platform,
) -> None:
    low = queue.start(queued, "patient", LOW, steps=60)
    low.wait(lambda now, _: (now.step or 0) >= 3, "it trains", 300)
    high = queue.start(queued, "urgent", HIGH, steps=4)
    low.wait(lambda now, _: now.phase == "Suspending", "it is asked to save", 120)
    high.wait_complete(300)
    low.wait_complete(300)
    journal = low.journal()
    assert_one_training_at_a_time(journal)
    assert queue.steps_of(low) == list(range(1, 61)), "a step is lost, or trained twice"
    (begun, resumed) = [line["step"] for line in journal if line["event"] == "start"]
    assert (begun, resumed > 0) == (0, True)
    told = queue.describe(low)
    assert f"Checkpoint {resumed} is committed, and the run goes on from it" in told
    assert queue.raw(low)["status"]["restarts"] == 0
    owners = {w["metadata"]["ownerReferences"][0]["kind"] for w in queue.workloads(queued)}
    assert owners <= {"RayCluster"}, "the RayCluster alone is a workload"
    low.verify()
    for run in (low, high):
        run.delete()


def test_a_run_that_is_preempted_again_and_again_loses_no_step(queued: Platform) -> None:
    run = queue.start(queued, "often", LOW, steps=1_000_000)
    saved = 0
    for number in range(PREEMPTIONS):
        began = time.monotonic()
        wanted = saved + 2

        def trains(wanted: int = wanted) -> bool:
            status = queue.raw(run).get("status") or {}
            step = (status.get("progress") or {}).get("step", 0)
            return status.get("phase") == "Running" and step >= wanted

        until(trains, f"it trains before preemption {number}")
        queue.preempt(queued, f"urgent-{number}")

        def given_up(number: int = number) -> bool:
            found = {w["metadata"]["name"]: w for w in queue.workloads(queued)}
            return queue.conditions(found[f"urgent-{number}"]).get("Admitted") == "True"

        until(given_up, f"preemption {number} is admitted")
        saved = queue.raw(run)["status"]["checkpoint"]["lastCommitted"]["step"]
        trained = queue.steps_of(run)
        assert trained == list(range(1, saved + 1)), f"preemption {number} lost a step"
        queue_name = f"urgent-{number}"
        words = ("delete", "workloads.kueue.x-k8s.io", queue_name, "--wait=false")
        queued.kubectl.run("-n", NAMESPACE, *words)
        print(f"preemption {number}: step {saved}, {time.monotonic() - began:.1f} s", flush=True)
    assert queue.raw(run)["status"]["restarts"] == 0
    run.delete()
