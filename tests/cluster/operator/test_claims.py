"""A run's claim that an administrator expands, or that is being deleted, on the real API server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.manifests import changed
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.operator.test_children import CLAIM, NO_IMAGE, delete, manifest, missing
from tests.cluster.ray_runs import condition, status

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]

SIZE, GROWN = "1Mi", "3Mi"
WATCHED_SECONDS = 20.0
NOWHERE = {
    "spec": {"containers": [{"name": "ray"}], "nodeSelector": {"kubernetes.io/hostname": "none"}}
}
# The head's, a trainer's, an explorer's and the monitor's.
PODS = 4


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory: Path = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, NO_IMAGE) as process:
        yield process


@pytest.fixture
def growing(kubectl: Kubectl) -> Iterator[None]:
    """The default StorageClass lets claims grow."""
    default = "storageclass.kubernetes.io/is-default-class"
    (name,) = (
        found["metadata"]["name"]
        for found in kubectl.list("storageclass")
        if (found["metadata"].get("annotations") or {}).get(default) == "true"
    )

    def set_to(truth: bool | None) -> None:
        patch = json.dumps({"allowVolumeExpansion": truth})
        kubectl("patch", "storageclass", name, "--type=merge", "-p", patch)

    set_to(True)
    try:
        yield
    finally:
        set_to(None)


def create(ns: Kubectl, name: str, *, pending: bool = False) -> None:
    """Create a run; no node takes the pods of a ``pending`` one, so that nothing of them changes.

    Of pods on a node the kubelet writes each failed pull, and each is news to look at.
    """
    run = changed(manifest(name), f"{CLAIM}.size", SIZE)
    if pending:
        for part in ("head", "groups.0", "groups.1"):
            run = changed(run, f"spec.clusters.0.{part}.template", NOWHERE)
        run = changed(run, "spec.monitor.resources", {"requests": {"cpu": "1000"}})
    done = ns.apply(run)
    assert done.returncode == 0, done.stderr
    wait_until(f"all children of {name} are there", lambda: not missing(ns, name))
    if pending:
        wait_until("no node takes its pods", lambda: unscheduled(ns, name) == PODS)


def unscheduled(ns: Kubectl, run: str) -> int:
    """How many of a run's pods the scheduler has given up on for now."""
    return sum(
        found["type"] == "PodScheduled" and found["status"] == "False"
        for pod in ns.list("pod", f"trainsync.dev/run={run}")
        for found in pod["status"].get("conditions", [])
    )


def claim_of(ns: Kubectl, run: str) -> dict[str, Any]:
    claim = ns.get("persistentvolumeclaim", f"{run}-checkpoints")
    assert claim is not None
    return claim


def suspend(ns: Kubectl, run: str, truth: bool) -> None:
    ns("patch", "trainingrun", run, "--type=merge", "-p", json.dumps({"spec": {"suspend": truth}}))


def test_a_claim_that_was_expanded_stays_so_and_its_directory_is_one_runs_at_a_time(
    module_namespace: Kubectl, operator: OperatorProcess, growing: None
) -> None:
    ns = module_namespace
    create(ns, "grown")
    wait_until("it is bound", lambda: claim_of(ns, "grown")["status"]["phase"] == "Bound")
    patch = json.dumps({"spec": {"resources": {"requests": {"storage": GROWN}}}})
    ns("patch", "persistentvolumeclaim", "grown-checkpoints", "--type=merge", "-p", patch)
    before = claim_of(ns, "grown")["metadata"]["resourceVersion"]

    suspend(ns, "grown", True)
    wait_until("it is suspended", lambda: status(ns, "grown")["phase"] == "Suspended")
    suspend(ns, "grown", False)
    wait_until("the next attempt starts", lambda: ns.get("raycluster", "grown-main-1"))
    wait_until("nothing is refused", lambda: condition(ns, "grown", "Ready")["reason"] == "Waiting")
    claim = claim_of(ns, "grown")
    assert claim["spec"]["resources"]["requests"]["storage"] == GROWN
    assert claim["metadata"]["resourceVersion"] == before, "the operator wrote to it"
    events = ns("get", "events", "--field-selector", "involvedObject.name=grown")
    assert "Refused" not in events

    beside = changed(manifest("beside"), "spec.checkpoint.path", "grown")
    storage = {"persistentVolumeClaim": {"claimName": "grown-checkpoints"}}
    assert ns.apply(changed(beside, "spec.checkpoint.storage", storage)).returncode == 0
    wait_until("it is held", lambda: status(ns, "beside").get("problem") == "DirectoryTaken")
    said = condition(ns, "beside", "Ready")["message"]
    assert said.startswith("TrainingRun grown saves into the directory grown of the claim")
    assert ns.list("raycluster", "trainsync.dev/run=beside") == []
    ns("delete", "trainingrun", "grown")
    wait_until("it begins", lambda: ns.get("raycluster", "beside-main-0"))
    delete(ns, "beside")


def test_a_claim_that_is_being_deleted_is_told_of_and_looked_at_ever_less_often(
    module_namespace: Kubectl, operator: OperatorProcess
) -> None:
    ns = module_namespace
    create(ns, "going", pending=True)
    # As pods that use it do.
    hold(ns, ["example.com/in-use"])
    ns("delete", "persistentvolumeclaim", "going-checkpoints", "--wait=false")

    def said() -> bool:
        ready = condition(ns, "going", "Ready")
        return ready["reason"] == "ClaimTerminating" and "no attempt can start" in ready["message"]

    wait_until("the condition says so", said)
    assert status(ns, "going")["problem"] == "ClaimTerminating"
    looks = operator.metric("trainsync_operator_reconciles_total")
    begun = time.monotonic()
    while time.monotonic() < begun + WATCHED_SECONDS:
        assert said(), "what it says flips"
        time.sleep(1)
    # 1, 1, 1, 2, 2, 3, 5, 7 s: each after half the time that the deletion has taken so far.
    assert operator.metric("trainsync_operator_reconciles_total") - looks <= 12
    events = [e for e in ns.list("events") if e["involvedObject"]["name"] == "going"]
    (event,) = [event for event in events if event["reason"] == "ClaimTerminating"]
    assert event.get("count", 1) == 1
    hold(ns, None)
    wait_until("a claim is made anew", lambda: not missing(ns, "going"), 60)
    wait_until("the run goes on", lambda: condition(ns, "going", "Ready")["reason"] == "Waiting")
    delete(ns, "going")


def hold(ns: Kubectl, finalizers: list[str] | None) -> None:
    patch = json.dumps({"metadata": {"finalizers": finalizers}})
    ns("patch", "persistentvolumeclaim", "going-checkpoints", "--type=merge", "-p", patch)
