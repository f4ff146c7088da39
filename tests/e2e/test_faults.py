"""Whole runs on a real cluster, each with a process killed at the worst moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.names import CHECKPOINT_MOUNT
from trainsync.monitor.core.views import ABSENT_STATES

from demo import faults
from demo.kubectl import Object, wait_for
from demo.snapshot import Snapshot
from monitoring.prometheus import Server
from monitoring.rules import Pace
from tests.e2e.command_line import CommandLine
from tests.e2e.harness import (
    NAMESPACE,
    Run,
    assert_one_training_at_a_time,
    assert_steps_follow_commits,
)
from tests.e2e.watching import watching

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., Run]
INTERVAL = 4
# Scales an alert's 15 minutes to 9 seconds.
PACE = Pace(100)


def half_saved(step: int) -> Callable[[Snapshot, Object], bool]:
    """One of two ranks has written its part of the step's save, and the save before is committed:
    ranks do not wait for that."""

    def condition(now: Snapshot, raw: Object) -> bool:
        saves = raw.get("status", {}).get("checkpoint", {}).get("inFlight") or []
        half = any((save["step"], save["receipts"]) == (step, 1) for save in saves)
        return half and now.committed == step - INTERVAL

    return condition


def starts(journal: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in journal if line["event"] == "start"]


def test_a_run_outlives_trainer_monitor_and_head_that_are_killed_at_the_worst_moment(
    start: Start,
) -> None:
    """A trainer and the monitor die in a save of which one of two ranks has written its part."""
    # So many that it trains still when the second slow save is committed. The first attempt never
    # begins that one: its slow save and the next are staged, and the one after those waits.
    steps, slow = 60, 5 * INTERVAL
    # The first is slow for longer than the attempt lives, also on a busy machine.
    saves = f"--slow 0 {2 * INTERVAL} 60 --slow 1 {slow} 15"
    run = start("killed", "--steps", str(steps), saves, interval=INTERVAL)
    run.wait(half_saved(2 * INTERVAL), "the first slow save is half written", 240)
    pod = faults.trainer_to_kill(run.kubectl, run.name, NAMESPACE)
    faults.kill_pod_processes(run.kubectl, pod, NAMESPACE)

    half = run.wait(half_saved(slow), "the second slow save is half written", 240)
    assert (half.attempt, half.restarts) == (1, 1)
    # What else there is to look at waits: the save and the steps that are left do not.
    selector = f"trainsync.dev/run={run.name},trainsync.dev/component=monitor"
    (monitor,) = run.kubectl.objects("pods", NAMESPACE, selector)
    words = ("--grace-period=0", "--force", "--wait=false")
    run.kubectl.run("-n", NAMESPACE, "delete", "pod", monitor["metadata"]["name"], *words)
    committed = run.wait(lambda now, _: (now.committed or 0) >= slow, "it is committed", 120)
    assert committed.attempt == 1

    # KubeRay starts the job of a head that has lost its GCS again: that one is refused.
    (head,) = faults.pods_of(run.kubectl, run.name, NAMESPACE, "Head")
    run.kubectl.exec(head["metadata"]["name"], NAMESPACE, "pkill", "-9", "gcs_server")
    assert slow in run.committed()
    told = run.kubectl.run("-n", NAMESPACE, "describe", "trainingrun", run.name)
    assert f"attempt 1 resumes from checkpoint {INTERVAL}" in told
    end = run.wait_complete(300)
    assert (end.step, end.committed) == (steps, steps)
    assert end.attempt >= 2
    run.verify()
    journal = run.journal()
    assert_one_training_at_a_time(journal)
    assert_steps_follow_commits(journal, INTERVAL)
    assert starts(journal)[:2] == [0, INTERVAL]
    assert starts(journal)[-1] >= slow, "what was committed before the kill was lost"


def test_of_two_runs_one_goes_back_and_one_scales_hangs_with_an_alert_and_resumes_at_its_step(
    start: Start, tmp_path: Path
) -> None:
    endless, long = 10_000, 120  # so that it trains still when the monitor hears of the rollback
    options = ("--steps", str(endless), "--trainers", "1", "--explorers")
    other = start("twin-a", *options, trainers=1, explorers=1, interval=endless)
    run = start("twin-b", "--steps", str(long), "--trainers", "1", trainers=1, interval=INTERVAL)
    run.wait(lambda now, _: (now.committed or 0) >= 2 * INTERVAL, "a second commit", 240)
    command = CommandLine(run.platform.kubectl.kubeconfig, NAMESPACE)
    with pytest.raises(AssertionError, match="checkpoint 5 is not committed"):
        command("rollback", run.name, "--step", "5")
    command("rollback", run.name, "--step", str(INTERVAL))
    for replicas in (1, 2, 1):
        if other.seen:
            words = ("scale", "trainingrun", other.name, f"--replicas={replicas}")
            other.kubectl.run("-n", NAMESPACE, *words)
        other.wait(lambda _, raw: in_step(raw) == replicas, f"{replicas} take weights", 240)  # noqa: B023
    journal = other.journal()
    assert starts(journal) == [0]
    assert len({line["incarnation"] for line in journal}) == 1, "scaling began a new attempt"
    with watching(other.kubectl, other.name, tmp_path, PACE) as prometheus:
        hangs_and_goes_on(other, prometheus)
    is_suspended_and_resumes(other)
    end = run.wait_complete(300)
    assert (end.attempt, end.restarts, end.step, end.committed) == (1, 0, long, long)
    run.verify()
    assert starts(run.journal()) == [0, INTERVAL]
    aside = run.in_monitor("sh", "-c", f"ls -d {CHECKPOINT_MOUNT}/{run.name}/rolled_back/*/*")
    assert f"global_step_{2 * INTERVAL}" in aside


def hangs_and_goes_on(run: Run, prometheus: Server) -> None:
    """Stop the driver until the alert fires, and let it go on until the alert ends."""

    def fires() -> bool:
        found = prometheus.firing().get("TrainsyncRunStalled", [])
        return [(alert["namespace"], alert["run"]) for alert in found] == [(NAMESPACE, run.name)]

    scraped = "trainsync_run_step > 0"
    wait_for(lambda: bool(prometheus.query(scraped)), what="a scrape", seconds=60)
    (head,) = faults.pods_of(run.kubectl, run.name, NAMESPACE, "Head")
    pod = head["metadata"]["name"]
    run.kubectl.exec(pod, NAMESPACE, "pkill", "-STOP", "-f", "workload.py")
    wait_for(fires, what="the alert fires", seconds=90)
    run.kubectl.exec(pod, NAMESPACE, "pkill", "-CONT", "-f", "workload.py")
    wait_for(lambda: not fires(), what="the alert ends", seconds=60)


def is_suspended_and_resumes(run: Run) -> None:
    """The run saves before its pods go, and no step of it is lost or trained twice."""
    run.suspend()
    run.wait(lambda now, _: now.phase == "Suspended", "it is suspended", 240)
    run.suspend(False)
    resumed = run.wait(
        lambda now, _: now.attempt == 1 and now.phase == "Running" and in_order(run, 3),
        "it trains again",
        300,
    )
    assert resumed.restarts == 0
    run.verify()
    assert_one_training_at_a_time(run.journal())
    told = run.kubectl.run("-n", NAMESPACE, "describe", "trainingrun", run.name)
    saved = starts(run.journal())[1]
    assert f"Checkpoint {saved} is committed, and the run goes on from it" in told


def in_order(run: Run, steps: int) -> bool:
    """Whether the second attempt has trained so many steps, with none lost or trained twice."""
    journal = run.journal()
    if len(starts(journal)) < 2:
        return False
    trained = [line["step"] for line in journal if line["event"] == "step"]
    assert trained == list(range(1, len(trained) + 1)), "a step is lost, or trained twice"
    return bool(trained[-1] >= starts(journal)[1] + steps)


def in_step(run: Object) -> int:
    """Explorers that are there, and serve weights."""
    weights = (run.get("status") or {}).get("weights") or {}
    explorers = weights.get("explorers") or []
    return sum(each["state"] not in ABSENT_STATES and each["version"] >= 0 for each in explorers)
