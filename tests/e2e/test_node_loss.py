"""Loss of a cluster node. Only on devcluster: a test must not kill a user's node."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from demo import faults
from demo.platform import REPOSITORY, Platform, devcluster_name, load_images, own_cluster
from tests.e2e import harness
from tests.e2e.test_faults import INTERVAL, starts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]


def this_cluster() -> str:
    return devcluster_name(os.environ.get("KUBECONFIG"))


def devcluster(*words: str) -> None:
    command = [sys.executable, "-m", "devcluster", "--name", this_cluster(), *words]
    subprocess.run(command, check=True, timeout=240, cwd=REPOSITORY)


STEPS = 32  # so that it trains still when the node is lost, also on a busy machine
# The first node runs KubeRay and CoreDNS, which new RayClusters need.
VICTIM = "node-2"


@pytest.fixture
def victim(platform: Platform) -> Iterator[str]:
    """A second node, which is Ready again after the test."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose nodes are not killed")
    devcluster("up", "--nodes", "2")
    load_images(platform.images, this_cluster())
    yield VICTIM
    devcluster("up")


# Longer than pods with `SOON` stay bound to a silent node; the node's attempt trains on meanwhile.
CUT = ("node-cut", VICTIM, "20")
KILL = ("node-kill", VICTIM)
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


@pytest.mark.parametrize("loss", [KILL, CUT], ids=lambda loss: str(loss[0]))
def test_when_a_node_is_lost_the_next_attempt_goes_on_and_the_lost_one_commits_nothing(
    platform: Platform, start: Callable[..., harness.Run], victim: str, loss: tuple[str, ...]
) -> None:
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [victim]}
    preference = {"weight": 100, "preference": {"matchExpressions": [term]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    run = start(
        *(loss[0], "--steps", str(STEPS), "--step-seconds", "1", "--trainers", "1"),
        trainers=1,
        interval=INTERVAL,
        pod={"affinity": affinity} | ({"tolerations": SOON} if loss is CUT else {}),
    )
    before = run.wait(lambda now, _: (now.committed or 0) >= INTERVAL, "the first commit", 240)
    assert where_ray_runs(platform, run) == {victim}
    devcluster(*loss)

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
    nodes = {line["attempt"]: line["node"] for line in journal}
    assert nodes[0] == victim
    if loss is KILL:
        harness.assert_one_training_at_a_time(journal)
        assert nodes[end.attempt] != victim


def where_ray_runs(platform: Platform, run: harness.Run) -> set[str]:
    pods = [
        pod
        for role in ("Head", "Trainer")
        for pod in faults.pods_of(platform.kubectl, run.name, harness.NAMESPACE, role)
    ]
    return {str(pod["spec"]["nodeName"]) for pod in pods}
