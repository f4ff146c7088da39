"""Runs in a queue of the real Kueue.

Not part of `make test`: `make test-kueue` builds Kueue first. TRAINSYNC_PREEMPTIONS says how often
the second test preempts its run.
"""

import os
import time
from collections.abc import Iterator
from functools import partial

import pytest
from trainsync_operator.reconcile.run import QUEUE_LABEL

from demo.platform import Platform
from tests.e2e.harness import NAMESPACE, RELEASE, assert_one_training_at_a_time
from tests.kueue import queue
from tests.kueue.queue import DEFAULT, HIGH, LOW, PAIR, PLACED, QUEUE, until

PREEMPTIONS = int(os.environ.get("TRAINSYNC_PREEMPTIONS", "3"))

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600 + 60 * PREEMPTIONS)]


@pytest.fixture(scope="module")
def queued(platform: Platform) -> Iterator[Platform]:
    queue.prepare(platform)
    boost = "kueue.priorityBoost"
    platform.install_chart(RELEASE, [NAMESPACE], f"{boost}.max=9", f"{boost}.gpuSeconds=1")
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
        # It saves only when it is asked to: what it trained since is what a preemption would cost.
        until(partial(queue.tells_of_the_risk, run, saved), "its status says the cost", 30)
        queue.preempt(queued, f"urgent-{number}")

        def given_up(number: int = number) -> bool:
            found = {w["metadata"]["name"]: w for w in queue.workloads(queued)}
            return queue.conditions(found[f"urgent-{number}"]).get("Admitted") == "True"

        until(given_up, f"preemption {number} is admitted")
        saved = queue.raw(run)["status"]["checkpoint"]["lastCommitted"]["step"]
        until(lambda: queue.raw(run)["status"]["atRisk"]["steps"] == 0, "nothing is at risk", 30)
        trained = queue.steps_of(run)
        assert trained == list(range(1, saved + 1)), f"preemption {number} lost a step"
        queue_name = f"urgent-{number}"
        words = ("delete", "workloads.kueue.x-k8s.io", queue_name, "--wait=false")
        queued.kubectl.run("-n", NAMESPACE, *words)
        print(f"preemption {number}: step {saved}, {time.monotonic() - began:.1f} s", flush=True)
    assert queue.raw(run)["status"]["restarts"] == 0
    run.delete()


def test_of_two_runs_of_one_priority_the_one_with_less_at_risk_is_preempted(
    queued: Platform,
) -> None:
    saving = queue.start(queued, "saving", LOW, 1_000_000, queue=PAIR, interval=1)
    saving.wait(lambda now, _: now.phase == "Running", "it trains", 300)
    # Of two workloads of one priority Kueue takes the one that was admitted later.
    risking = queue.start(queued, "risking", LOW, 1_000_000, queue=PAIR)
    risking.wait(lambda now, _: now.phase == "Running", "it trains", 300)

    def is_dearer() -> bool:
        return queue.boost(queued, risking) >= queue.boost(queued, saving) + 2

    until(is_dearer, "what is at risk raises its priority", 180)
    queue.preempt(queued, "urgent", PAIR)
    saving.wait(lambda now, _: now.phase == "Suspending", "it is asked to save", 120)
    until(lambda: queue.waits(saving), "it waits in the queue", 120)
    assert queue.raw(risking)["status"]["phase"] == "Running"
    until(lambda: queue.boost(queued, saving) == 0, "what waits is not boosted", 60)
    (began,) = [line for line in risking.journal() if line["event"] == "start"]
    assert began["step"] == 0
    queued.kubectl.run("-n", NAMESPACE, "delete", "workloads.kueue.x-k8s.io", "urgent")
    for run in (saving, risking):
        run.delete()


def test_a_run_without_a_queue_waits_in_the_default_one_and_trains_when_there_is_room(
    queued: Platform,
) -> None:
    queue.apply(queued, "LocalQueue", DEFAULT, {"spec": {"clusterQueue": QUEUE}})
    queue.preempt(queued, "ahead")
    run = queue.start(queued, "unlabelled", None, steps=6)
    until(lambda: queue.waits(run), "it waits in the default queue", 120)
    (workload,) = (w for w in queue.workloads(queued) if w["spec"]["queueName"] == DEFAULT)
    assert queue.conditions(workload).get("Admitted") != "True"
    queued.kubectl.run("-n", NAMESPACE, "delete", "workloads.kueue.x-k8s.io", "ahead")
    until(lambda: queue.are_held(run), "its pods come, and are held", 120)
    run.wait_complete(300)
    assert queue.steps_of(run) == list(range(1, 7))
    status = queue.raw(run)["status"]
    assert (status["attempt"], status["restarts"], status.get("problem")) == (0, 0, None)
    run.delete()
    queued.kubectl.run("-n", NAMESPACE, "delete", "localqueues.kueue.x-k8s.io", DEFAULT)


def test_a_run_that_kueue_manages_without_a_queue_waits_until_it_names_one_that_places_its_pods(
    queued: Platform,
) -> None:
    run = queue.start(queued, "unqueued", None, steps=6, asks=True)
    until(lambda: queue.waits(run), "it waits", 120)
    (workload,) = queue.workloads(queued)
    assert not workload["spec"].get("queueName")
    assert queue.has_what_was_asked(workload), workload["spec"]["podSets"]
    queue.label(run, f"{QUEUE_LABEL}={PLACED}")
    until(lambda: queue.are_held(run), "its pods come, and are held", 120)
    until(lambda: queue.is_placed(queued, run), "they run where Kueue places them", 60)
    run.wait_complete(300)
    status = queue.raw(run)["status"]
    assert (status["attempt"], status["restarts"]) == (0, 0)
    run.delete()
