"""Loss of a cluster node, and of ranks. Only on devcluster: a test must not kill a user's node."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from trainsync.api.names import LABEL_ROLE, LABEL_RUN

from demo import faults
from demo.cli import MANIFEST, load_run
from demo.kubectl import Object, wait_for
from demo.platform import REPOSITORY, Platform, devcluster_name, load_images, own_cluster
from tests.e2e import example, harness
from tests.e2e.test_faults import INTERVAL, starts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]


def this_cluster() -> str:
    return devcluster_name(os.environ.get("KUBECONFIG"))


def devcluster(*words: str) -> None:
    command = [sys.executable, "-m", "devcluster", "--name", this_cluster(), *words]
    subprocess.run(command, check=True, timeout=240, cwd=REPOSITORY)


STEPS = 32  # so that it trains still when the node is lost, also on a busy machine
MEMORY_STEPS = 48
# The first node runs KubeRay and CoreDNS, which new RayClusters need.
VICTIM = "node-2"
LOSING = "node-kill"
# `test_bucket` has the method `nccl`, the demo `memory`.
SYNC: Object = {
    "method": "checkpoint",
    "style": "trainer_driven",
    "interval": 2,
    "timeoutSeconds": 60,
}


@pytest.fixture
def victim(platform: Platform) -> Iterator[str]:
    """A second node, which is Ready again after the test."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose nodes are not killed")
    devcluster("up", "--nodes", "2")
    load_images(platform.images, this_cluster())
    yield VICTIM
    devcluster("up")


# In place of the operator's own tolerations, of 30 s.
SOON = [
    {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 5,
    }
    for state in ("not-ready", "unreachable")
]


def test_when_a_node_is_cut_off_the_next_attempt_goes_on_and_the_lost_one_commits_nothing(
    platform: Platform, start: Callable[..., harness.Run], victim: str
) -> None:
    pod = {"affinity": on(victim, "In", required=False), "tolerations": SOON}
    options = ("--steps", str(STEPS), "--step-seconds", "1", "--trainers", "1")
    run = start("node-cut", *options, trainers=1, interval=INTERVAL, pod=pod)
    before = run.wait(lambda now, _: (now.committed or 0) >= INTERVAL, "the first commit", 240)
    assert where_ray_runs(platform, run) == {victim}
    # Longer than its pods stay bound to a silent node; the node's attempt trains on meanwhile.
    devcluster("node-cut", victim, "20")

    end = run.wait_complete(300)
    assert (end.step, end.committed) == (STEPS, STEPS)
    assert end.attempt >= 1
    assert end.restarts == 0, "the loss of a node used up maxRestarts"
    assert end.infrastructure_restarts >= 1
    run.verify()
    journal = run.journal()
    harness.assert_steps_follow_commits(journal, INTERVAL)
    assert before.committed is not None
    assert starts(journal)[-1] >= before.committed
    by = run.committed_by()
    assert [by[step] for step in sorted(by)] == sorted(by.values()), "a lost attempt committed"
    assert journal[0]["node"] == victim


def test_a_rank_that_dies_in_place_in_its_job_or_with_its_node_loads_the_last_step_from_memory(
    platform: Platform, victim: str
) -> None:
    run = example.start(
        platform,
        LOSING,
        MEMORY_STEPS,
        # The second kill ends the job; it trains still when the node is lost.
        "--max-restarts 1 --step-seconds 0.7",
        clusters=spread(victim),
        checkpoint=load_run(MANIFEST)["spec"]["checkpoint"]
        | {"memory": {"budget": "256Mi", "copies": 1}, "interval": INTERVAL},
        failurePolicy={"maxRestarts": 1, "backoffSeconds": 0, "restartScope": "Job"},
        sync=SYNC,
    )
    try:
        run.wait(lambda now, _: (now.committed or 0) >= INTERVAL, "the first commit", 240)
        before = ray_pods(platform, run)
        lost = {name for name, (_, node) in before.items() if node == victim}
        assert {role for role, node in before.values() if node == victim} == {"Trainer", "Explorer"}
        goes_on_from_memory_twice(platform, run)
        assert ray_pods(platform, run) == before, "other pods: their memory was not that of before"
        devcluster("node-kill", victim)

        resumed = run.wait(
            lambda now, _: now.attempt >= 2 and now.phase == "Running", "it goes on", 240
        )
        assert (resumed.restarts, resumed.infrastructure_restarts >= 1) == (1, True)
        after = ray_pods(platform, run)
        assert before.keys() - lost <= after.keys(), "pods of a node that lives were made anew"
        assert not lost & after.keys()
        end = run.wait_complete(180)
        assert (end.step, end.committed, end.restarts) == (MEMORY_STEPS, MEMORY_STEPS, 1)
        assert end.metrics["resumed_step"] >= 3 * INTERVAL
        assert example.loaded_bytes(run, "memory") > 100_000
        assert example.loaded_bytes(run, "volume") == 0
        example.check_explorers(run, end, SYNC["method"], MEMORY_STEPS)
        example.check_volume(run, MEMORY_STEPS)
    finally:
        devcluster("up")  # the monitor's pod may be there, and goes with its node alone
        run.delete()


def goes_on_from_memory_twice(platform: Platform, run: harness.Run) -> None:
    """Kill a rank, which starts again in place; when it has saved, again, which takes a new job."""
    rank = faults.trainer_to_kill(platform.kubectl, run.name, harness.NAMESPACE)
    faults.kill_rank(platform.kubectl, rank, harness.NAMESPACE)
    restarted = run.wait(lambda now, _: now.restarts_in_place == 1, "it goes on in place", 120)
    assert (restarted.attempt, restarted.restarts) == (0, 0)
    # The status has the restart before the new ranks have loaded.
    wait_for(
        lambda: example.loaded_bytes(run, "memory") > 100_000,
        what="the new ranks to load from memory",
        seconds=120,
    )
    saved = max(restarted.committed or 0, INTERVAL) + INTERVAL
    run.wait(lambda now, _: (now.committed or 0) >= saved, "it saves again", 120)
    in_place = example.loaded_bytes(run, "memory")
    faults.kill_rank(platform.kubectl, rank, harness.NAMESPACE)
    # Attempt 0 may have saved once more before it died: its last report is of an older resumption.
    again = run.wait(
        lambda now, _: (
            now.attempt == 1
            and now.metrics.get("resumed_step", 0) >= saved
            and (now.committed or 0) >= saved + INTERVAL
        ),
        "the new job has resumed at what was saved, and saved",
        240,
    )
    assert (again.restarts, again.infrastructure_restarts) == (1, 0)
    assert example.loaded_bytes(run, "memory") > in_place
    assert example.loaded_bytes(run, "volume") == 0


def on(node: str, operator: str, *, required: bool) -> Object:
    term = {
        "matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": operator, "values": [node]}
        ]
    }
    if required:
        terms = {"nodeSelectorTerms": [term]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    preference = {"weight": 100, "preference": term}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def spread(victim: str) -> list[Object]:
    """The example's cluster: the head not on the victim, one of each group's pods there."""
    clusters: list[Object] = load_run(MANIFEST)["spec"]["clusters"]
    (cluster,) = clusters
    cluster["head"]["template"]["spec"]["affinity"] = on(victim, "NotIn", required=True)
    for group in cluster["groups"]:
        apart = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            # Once the node is lost, its part of the pods may be elsewhere.
            "nodeTaintsPolicy": "Honor",
            "labelSelector": {"matchLabels": {LABEL_RUN: LOSING, LABEL_ROLE: group["role"]}},
        }
        group["template"]["spec"] |= {"topologySpreadConstraints": [apart], "tolerations": SOON}
    return clusters


def ray_pods(platform: Platform, run: harness.Run) -> dict[str, tuple[str, str]]:
    """Role and node of each Ray pod, by its UID."""
    return {
        pod["metadata"]["uid"]: (role, str(pod["spec"]["nodeName"]))
        for role in ("Head", "Trainer", "Explorer")
        for pod in faults.pods_of(platform.kubectl, run.name, harness.NAMESPACE, role)
    }


def where_ray_runs(platform: Platform, run: harness.Run) -> set[str]:
    return {node for role, node in ray_pods(platform, run).values() if role != "Explorer"}
