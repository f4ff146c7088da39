"""Attempts on a real cluster, with real Ray pods, monitors and jobs, and what is left of earlier
ones: a pod that does not go, and the job of a deleted namesake."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from trainsync.api import names
from trainsync.api.env import ATTEMPT, SYNC_INTERVAL
from trainsync_operator.controller.priority_boosts import (
    BOOST_ANNOTATION,
    JOB_UID_LABEL,
    LOOK_SECONDS,
)
from trainsync_operator.kube.kinds import WORKLOAD
from trainsync_operator.kube.objects import parse_time
from trainsync_operator.reconcile.decide.attempts import backoff
from trainsync_operator.reconcile.run import QUEUE_LABEL, parse

from demo.platform import Platform
from tests.cluster.chart.helm import FIXTURES
from tests.cluster.conftest import Kubectl, served_without_controller, wait_until
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.prepared import prepared
from tests.cluster.ray_runs import (
    REPORTING,
    START_SECONDS,
    condition,
    delete,
    start,
    status,
    wait_phase,
)

# Within which a cause must stand in the status and in an Event.
TOLD_SECONDS = 15.0
HOLD = "example.com/hung-volume"
GRACE_SECONDS = 2
# The operator calls a pod stuck 15 s after its grace period.
WATCHED_SECONDS = 22.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crd"),
]


@pytest.fixture(scope="module")
def platform() -> Platform:
    """The tests' cluster with this tree's images."""
    return prepared()


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory: Path = tmp_path_factory.mktemp("operator")
    workloads = FIXTURES / "kueue" / "workloads.yaml"
    with (
        served_without_controller(module_namespace, workloads),
        running_operator(
            module_namespace, directory, platform.images.monitor, priority_boost=True
        ) as process,
    ):
        yield process


@pytest.fixture(scope="module")
def ns(module_namespace: Kubectl, operator: OperatorProcess) -> Kubectl:
    """The operator's namespace."""
    return module_namespace


def test_a_container_that_exits_before_the_job_is_told_of_and_ends_its_attempt(
    ns: Kubectl, platform: Platform
) -> None:
    start(ns, platform, "exits", "true", {"no-such-flag": "1"}, maxRestarts=0)
    ended = "{.items[*].status.containerStatuses[0].state.terminated.exitCode}"
    selector = f"{names.LABEL_RUN}=exits,{names.LABEL_ROLE}=Head"

    def has_ended() -> bool:
        return bool(ns("get", "pod", "-l", selector, "-o", f"jsonpath={ended}"))

    wait_until("a head pod has ended", has_ended, START_SECONDS)

    def told() -> bool:
        ready = condition(ns, "exits", "Ready")
        return ready["reason"] == "PodsFailing" and "The head pod" in ready["message"]

    wait_until("the condition says so", told, TOLD_SECONDS)
    assert "Its last lines: " in condition(ns, "exits", "Ready")["message"]
    events = ns("get", "events", "--field-selector", "involvedObject.name=exits")
    assert events.count("PodsFailing") == 1
    patch = '{"spec": {"failurePolicy": {"startupDeadlineSeconds": 1}}}'
    ns("patch", "trainingrun", "exits", "--type=merge", "-p", patch)
    wait_phase(ns, "exits", "Failed", 60)
    assert "exit code" in condition(ns, "exits", "Failed")["message"]
    delete(ns, "exits")


def test_neither_a_refused_edit_nor_an_explorer_pod_that_does_not_go_costs_a_pod_or_an_attempt(
    ns: Kubectl, platform: Platform
) -> None:
    """The pod holds up no attempt, either, which an edit of what runs begins on new pods."""
    start(ns, platform, "edited", f"python -c '{REPORTING}'", explorers=1)
    wait_phase(ns, "edited", "Running")
    explorers = f"{names.LABEL_RUN}=edited,{names.LABEL_ROLE}=Explorer"
    (hung,) = [pod["metadata"]["name"] for pod in ns.list("pod", explorers)]
    selector = f"{names.LABEL_RUN}=edited,{names.LABEL_ROLE}=Trainer"
    (before,) = ns.list("pod", selector)
    (cluster,) = (ns.get("trainingrun", "edited") or {})["spec"]["clusters"]
    template = cluster["groups"][0]["template"]

    def edit(sync: dict[str, int], **container: str) -> None:
        (ray,) = template["spec"]["containers"]
        edited = {**template["spec"], "containers": [{**ray, **container}]}
        cluster["groups"][0]["template"] = {**template, "spec": edited}
        patch = json.dumps({"spec": {"clusters": [cluster], "sync": sync}})
        ns("patch", "trainingrun", "edited", "--type=merge", "-p", patch)

    edit(
        {}, imge="a"
    )  # no pod has this field: the TrainingRun's CRD takes it, the RayCluster's not

    def refused() -> bool:
        ready = condition(ns, "edited", "Ready")
        return ready["reason"] == "Refused" and "imge" in ready["message"]

    wait_until("the condition says so", refused)
    (after,) = ns.list("pod", selector)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert status(ns, "edited")["attempt"] == 0
    assert ns.get("raycluster", "edited-main-1") is None, "a dry run makes nothing"
    try:
        hold(ns, hung, [HOLD])
        ns("delete", "pod", hung, f"--grace-period={GRACE_SECONDS}", "--wait=false")
        stays_as_it_is(ns, hung, attempt=0)
        # The next attempt has RayClusters of its own, beside the pod that does not go.
        edit({"interval": 7}, imagePullPolicy="IfNotPresent")
        wait_until("there is a new attempt", lambda: status(ns, "edited")["attempt"] == 1)
        wait_phase(ns, "edited", "Running")
        stays_as_it_is(ns, hung, attempt=1)
    finally:
        hold(ns, hung, None)
    wait_until("the pod is gone", lambda: ns.get("pod", hung) is None)
    (pod,) = ns.list("pod", f"{selector},{names.LABEL_ATTEMPT}=1")
    (ray,) = pod["spec"]["containers"]
    assert ray["imagePullPolicy"] == "IfNotPresent"
    assert {e["name"]: e.get("value") for e in ray["env"]}[SYNC_INTERVAL] == "7"
    _check_priority_boost(ns, "edited-main-1")
    delete(ns, "edited")


def stays_as_it_is(ns: Kubectl, pod: str, *, attempt: int) -> None:
    """Nothing is restarted for long enough, while the pod is there."""
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        assert ns.get("pod", pod) is not None
        now = status(ns, "edited")
        seen = (now["phase"], now["attempt"], now["restarts"], now["infrastructureRestarts"])
        assert seen == ("Running", attempt, 0, 0), condition(ns, "edited", "Ready")
        time.sleep(1)  # between two looks: nothing is to happen for so long


def hold(ns: Kubectl, pod: str, finalizers: list[str] | None) -> None:
    patch = json.dumps({"metadata": {"finalizers": finalizers}})
    ns.run("patch", "pod", pod, "--type=merge", "-p", patch)


def _check_priority_boost(ns: Kubectl, ray_cluster: str) -> None:
    """The Workload that Kueue would have made of a RayCluster is raised by what is at risk."""
    ns("label", "raycluster", ray_cluster, f"{QUEUE_LABEL}=one")
    ray = ns.get("raycluster", ray_cluster)
    assert ray is not None
    container = {"name": "c", "image": "none:1"}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    workload = {
        "apiVersion": WORKLOAD.api_version,
        "kind": WORKLOAD.name,
        "metadata": {"name": "edited", "labels": {JOB_UID_LABEL: ray["metadata"]["uid"]}},
        "spec": {"podSets": [{"name": "main", "count": 1, "template": template}]},
    }
    assert ns.apply(workload).returncode == 0

    def boosted() -> bool:
        found = ns.get("workloads.kueue.x-k8s.io", "edited")
        assert found is not None
        return int(found["metadata"]["annotations"][BOOST_ANNOTATION]) >= 1

    wait_until("its priority is boosted", boosted, 2 * LOOK_SECONDS)


def test_a_lost_trainer_pod_starts_the_next_attempt(ns: Kubectl, platform: Platform) -> None:
    start(ns, platform, "lost", f"python -c '{REPORTING}'", backoffSeconds=5)
    wait_phase(ns, "lost", "Running")
    wait_until("it is Ready", lambda: condition(ns, "lost", "Ready")["status"] == "True")
    assert status(ns, "lost")["restarts"] == 0
    selector = f"{names.LABEL_RUN}=lost,{names.LABEL_ROLE}=Trainer"
    # kubectl does not wait for the pod's end: the back-off that is looked for passes meanwhile.
    ns("delete", "pod", "-l", selector, "--grace-period=0", "--force", "--wait=false")
    wait_phase(ns, "lost", "Restarting", 60)
    now = status(ns, "lost")
    assert (now["attempt"], now["restarts"]) == (1, 1)
    waits = parse_time(now["nextAttemptTime"]) - parse_time(now["lastFailure"]["time"])
    run = ns.get("trainingrun", "lost")
    assert run is not None
    assert waits == backoff(parse(run), 0), "with the jitter of this run and restart"
    assert timedelta(seconds=4) <= waits <= timedelta(seconds=5)
    wait_phase(ns, "lost", "Running", START_SECONDS)
    now = status(ns, "lost")
    assert (now["attempt"], now["clusters"][0]["attempt"]) == (1, 0), "the same RayCluster"
    jobs = [obj["metadata"]["name"] for obj in ns.list("rayjob", f"{names.LABEL_RUN}=lost")]
    assert jobs == ["lost-main-1"], "the driver of attempt 0 was stopped"
    events = ns("get", "events", "--field-selector", "involvedObject.name=lost")
    assert "TrainerPodLost" in events
    failure = now["lastFailure"]
    assert (failure["attempt"], failure["reason"]) == (0, "TrainerPodLost"), "it outlives a restart"
    assert "trainer pods of cluster main" in failure["message"]
    drain(ns, selector)
    wait_phase(ns, "lost", "Restarting", 60)
    now = status(ns, "lost")
    assert (now["attempt"], now["restarts"], now["infrastructureRestarts"]) == (2, 1, 1)
    events = ns("get", "events", "--field-selector", "involvedObject.name=lost")
    assert "EvictionByEvictionAPI" in events
    delete(ns, "lost")  # while it restarts


def drain(ns: Kubectl, selector: str) -> None:
    """`kubectl drain` of the node of the pods of the run, for these pods alone."""
    (pod,) = ns.list("pod", selector)
    node = pod["spec"]["nodeName"]
    assert pod["metadata"].get("deletionTimestamp") is None
    words = ("--pod-selector", selector, "--force", "--delete-emptydir-data", "--timeout=30s")
    try:
        ns("drain", node, *words, "--grace-period=5")
    finally:
        ns("uncordon", node)


def test_a_job_that_fails_meets_a_rule_by_its_exit_code_and_else_uses_up_its_restarts(
    ns: Kubectl, platform: Platform
) -> None:
    rule = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [42]}}
    job = f"exit $(( ${ATTEMPT} == 0 ? 42 : 3 ))"
    start(ns, platform, "fails", job, maxRestarts=0, backoffSeconds=1, rules=[rule])
    wait_phase(ns, "fails", "Failed")
    now = status(ns, "fails")
    assert (now["attempt"], now["restarts"]) == (1, 0)
    failed = condition(ns, "fails", "Failed")
    assert failed["reason"] == "MaxRestartsExceeded"
    assert "spec.failurePolicy.maxRestarts" in failed["message"]
    assert "exit code 3" in failed["message"]
    events = ns("get", "events", "--field-selector", "involvedObject.name=fails")
    assert events.count("JobFailed") >= 1
    assert "spec.failurePolicy.rules[0]: Ignore" in events
    delete(ns, "fails")


def test_the_succeeded_job_of_a_namesake_that_was_deleted_alone_completes_no_other_run(
    ns: Kubectl, platform: Platform
) -> None:
    start(ns, platform, "twice", "true", ttl=3600)
    wait_phase(ns, "twice", "Complete")
    old = uid_of_job(ns)
    assert old is not None
    ns("delete", "trainingrun", "twice", "--cascade=orphan")
    assert uid_of_job(ns) == old
    time.sleep(1.1)  # times of creation are whole seconds

    start(ns, platform, "twice", "true")

    def said() -> bool:
        ready = condition(ns, "twice", "Ready")
        return ready["reason"] == "NameTaken" and "RayCluster twice-main-0" in ready["message"]

    wait_until("the status names what is in the way", said)
    now = status(ns, "twice")
    assert now["phase"] not in ("Complete", "Running")
    assert "completionTime" not in now
    assert uid_of_job(ns) == old, "the operator took what is not its own"
    ns("delete", "raycluster", "twice-main-0")
    ns("delete", "rayjob", "twice-main-0", "--ignore-not-found")
    wait_until("it has a job of its own", lambda: uid_of_job(ns) not in (None, old), START_SECONDS)
    wait_phase(ns, "twice", "Complete", START_SECONDS)
    assert condition(ns, "twice", "Complete")["reason"] == "JobSucceeded"
    assert status(ns, "twice")["attempt"] == 0
    # An ended run deletes its pods at once (ttl 0), but keeps its monitor.
    wait_until("its pods go", lambda: ns.get("raycluster", "twice-main-0") is None)
    assert ns.get("deployment", "twice-monitor") is not None
    delete(ns, "twice")


def uid_of_job(ns: Kubectl) -> str | None:
    found = ns.get("rayjob", "twice-main-0")
    return None if found is None else str(found["metadata"]["uid"])
