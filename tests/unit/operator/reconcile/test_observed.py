"""Facts read from objects as KubeRay and the kubelet write them."""

from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.kube.kinds import DEPLOYMENT, POD, RAY_CLUSTER, RAY_JOB, SERVICE, Kind
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.observed import (
    JobPhase,
    deployment_is_ready,
    read_job,
    read_pod,
    read_ray_cluster,
)
from trainsync_operator.reconcile.trimmed import trim

META = {
    "name": "x",
    "uid": "u",
    "generation": 2,
    "creationTimestamp": "2026-01-01T00:00:00Z",
    "labels": {
        names.LABEL_CLUSTER: "main",
        names.LABEL_ATTEMPT: "3",
        names.LABEL_ROLE: "Trainer",
        names.LABEL_GROUP: "trainer",
    },
}


@pytest.mark.parametrize(
    ("deployment", "job", "phase"),
    [
        ("", "", JobPhase.PENDING),
        ("Initializing", "", JobPhase.PENDING),
        ("Running", "PENDING", JobPhase.PENDING),
        ("Running", "RUNNING", JobPhase.RUNNING),
        ("Complete", "SUCCEEDED", JobPhase.SUCCEEDED),
        ("Complete", "STOPPED", JobPhase.STOPPED),
        ("Failed", "FAILED", JobPhase.FAILED),
        ("Failed", "RUNNING", JobPhase.FAILED),
        ("Failed", "", JobPhase.FAILED),
        ("ValidationFailed", "", JobPhase.INVALID),
        ("Running", "SUCCEEDED", JobPhase.PENDING),
    ],
)
def test_the_phase_of_a_job(deployment: str, job: str, phase: JobPhase) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job, "message": "a\n  b"}
    read = read_job({"metadata": META, "status": status})
    assert read.phase is phase
    assert (read.attempt, read.cluster, read.message) == (3, "main", "a b")


def test_of_a_jobs_long_log_the_beginning_and_the_last_lines_are_told_without_secrets() -> None:
    said = "Job entrypoint command failed with exit code 1, last available logs:"
    log = "\n".join(f"step {n}" for n in range(3000))
    message = f"{said}\n{log}\nkey hf_abc of x9yz\nValueError: NaN"
    runtime = 'env_vars: {HF_TOKEN: hf_abc, MODEL: "8"}'
    obj = {
        "metadata": META,
        "spec": {"runtimeEnvYAML": runtime},
        "status": {"jobDeploymentStatus": "Failed", "message": message},
    }
    pod = {"spec": {"containers": [{"env": [{"name": "PASSWORD", "value": "x9yz"}]}]}}
    told = read_job(obj, [pod]).message
    assert told.startswith(f"{said} step 2982 | step 2983")
    assert told.endswith("key *** of *** | ValueError: NaN")
    assert len(told) < 820


def test_an_object_whose_attempt_label_was_spoilt_belongs_to_no_attempt() -> None:
    spoilt = {**META, "labels": {names.LABEL_ATTEMPT: "x"}}
    assert read_job({"metadata": spoilt}).attempt == -1


def test_a_ray_cluster_is_judged_by_its_conditions_and_not_by_its_state() -> None:
    status = {
        "state": "ready",
        "observedGeneration": 1,
        "conditions": [
            {
                "type": "HeadPodReady",
                "status": "False",
                "lastTransitionTime": "2026-01-01T00:00:09Z",
            },
            {"type": "ReplicaFailure", "status": "True", "message": "quota"},
        ],
    }
    read = read_ray_cluster({"metadata": META, "spec": {"suspend": True}, "status": status})
    assert not read.head_ready
    assert read.head_ready_since is not None
    assert read.lagging
    assert read.failure == "quota"
    assert read.suspended


def _ready(status: str, *, containers: str) -> list[dict[str, Any]]:
    return [
        {"type": "Ready", "status": status},
        {"type": "ContainersReady", "status": containers},
    ]


def _pod(**status: Any) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": META,
        "spec": {"containers": [{"name": "ray"}, {"name": "side"}]},
        "status": {"phase": "Running", "conditions": ready, **status},
    }


@pytest.mark.parametrize(
    ("status", "disruption"),
    [
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "X"}]}, "X"),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "X"}]}, None),
        ({"phase": "Failed", "reason": "NodeShutdown"}, "NodeShutdown"),
        # Of its own storage: the kubelet sets no DisruptionTarget.
        ({"phase": "Failed", "reason": "Evicted"}, None),
        ({"conditions": _ready("False", containers="True")}, "NodeNotReady"),
        # By the kubelet: a probe failed.
        ({"conditions": _ready("False", containers="False")}, None),
        ({"conditions": _ready("True", containers="True")}, None),
        ({}, None),
    ],
)
def test_whether_the_infrastructure_took_a_pod(
    status: dict[str, Any], disruption: str | None
) -> None:
    assert read_pod(_pod(**status)).disruption == disruption


def test_a_pod_that_waits_for_a_gate_is_on_a_node_that_lives_also_as_the_store_keeps_it() -> None:
    obj = _pod(conditions=_ready("False", containers="True"))
    assert read_pod(trim(POD, obj)).disruption == "NodeNotReady"
    # The kubelet says why, whereas the node's controller leaves the reason empty.
    obj["status"]["conditions"][0]["reason"] = "ReadinessGatesNotReady"
    assert read_pod(trim(POD, obj)).disruption is None


def test_the_last_lines_of_a_container_are_read_and_masked() -> None:
    ended = {"reason": "Error", "exitCode": 1, "message": "no\nsk-123"}
    obj = _pod(containerStatuses=[{"name": "ray", "state": {"terminated": ended}}])
    obj["spec"]["containers"][0]["env"] = [{"name": "API_KEY", "value": "sk-123"}]
    done = {"name": "fetch", "state": {"terminated": {"exitCode": 0}}}
    obj["status"]["initContainerStatuses"] = [done]  # no failure
    read = read_pod(obj)
    assert (read.ended, read.last_words) == ("Error, exit code 1", "no | ***")
    assert read.exits == (("ray", 1),)


def test_a_container_in_a_crash_loop_says_why() -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    before = {"terminated": {"exitCode": 1, "message": "no volume"}}
    entry = {"name": "monitor", "state": {"waiting": waiting}, "lastState": before}
    read = read_pod(_pod(containerStatuses=[entry]))
    assert read.problem == "CrashLoopBackOff: back-off 10s Its last lines: no volume"


def _scheduled(status: str) -> list[dict[str, Any]]:
    return [{"type": "PodScheduled", "status": status}]


@pytest.mark.parametrize(
    ("status", "deleting", "held", "waiting"),
    [
        ({"phase": "Running"}, False, True, False),
        # It has its GPUs until its last container has ended.
        ({"phase": "Running"}, True, True, False),
        ({"phase": "Pending", "conditions": _scheduled("True")}, False, True, False),
        ({"phase": "Pending", "conditions": _scheduled("False")}, False, False, True),
        ({"phase": "Pending", "conditions": []}, False, False, True),
        ({"phase": "Failed"}, False, False, False),
        ({"phase": "Succeeded"}, False, False, False),
    ],
)
def test_whether_a_pod_holds_gpus_or_waits_for_a_node_also_as_the_store_keeps_it(
    status: dict[str, Any], deleting: bool, held: bool, waiting: bool
) -> None:
    obj = _pod(**status)
    obj["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "8", "cpu": "4"}}
    if deleting:
        obj["metadata"] = {**META, "deletionTimestamp": "2026-01-01T00:01:00Z"}
    for seen in (obj, trim(POD, obj)):
        read = read_pod(seen)
        assert (read.held, read.waiting, read.gpus) == (held, waiting, 8)


_HEAD = {"type": "HeadPodReady", "status": "True", "lastTransitionTime": "2026-01-01T00:00:09Z"}
_OF_CONTROLLERS: list[tuple[Kind, dict[str, Any], dict[str, Any]]] = [
    (
        RAY_CLUSTER,
        {"observedGeneration": 2, "head": {"serviceName": "svc"}, "conditions": [_HEAD]},
        {"lastUpdateTime": "x", "readyWorkerReplicas": 1, "head": {"podIP": "1.1.1.1"}},
    ),
    (
        RAY_JOB,
        {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running", "message": "m"},
        {"startTime": "x", "rayClusterStatus": {"desiredCPU": "1"}},
    ),
    (
        DEPLOYMENT,
        {"observedGeneration": 2, "readyReplicas": 1, "updatedReplicas": 1, "conditions": []},
        {"replicas": 1, "unavailableReplicas": 1},
    ),
    (SERVICE, {}, {"loadBalancer": {"ingress": []}}),
]


@pytest.mark.parametrize(("kind", "read", "further"), _OF_CONTROLLERS)
def test_the_store_keeps_what_is_read_of_a_status_and_what_else_a_controller_writes_is_no_news(
    kind: Kind, read: dict[str, Any], further: dict[str, Any]
) -> None:
    meta = {**META, "namespace": "team", "resourceVersion": "1"}
    store = Store(trim)
    store.put(kind, {"metadata": meta, "status": read})
    more = {**read, **further}
    if "head" in further:
        more["head"] = {**read["head"], **further["head"]}
    written = {"metadata": {**meta, "resourceVersion": "2"}, "status": more}
    assert not store.put(kind, written)
    kept = store.get(kind, "team", "x")
    assert kept is not None
    if kind is RAY_CLUSTER:
        assert read_ray_cluster(kept) == read_ray_cluster(written)
    if kind is RAY_JOB:
        assert read_job(kept) == read_job(written)
    if kind is DEPLOYMENT:
        assert deployment_is_ready(kept)
    changed = {**read, "conditions": [{**_HEAD, "status": "False"}]}
    meta = {**meta, "resourceVersion": "3"}
    assert store.put(kind, {"metadata": meta, "status": changed})


def test_a_running_ready_pod_is_alive_and_ready() -> None:
    read = read_pod(_pod())
    assert (read.alive, read.ready, read.attempt, read.group) == (True, True, 3, "trainer")


@pytest.mark.parametrize("phase", ["Failed", "Succeeded", "Unknown"])
def test_a_pod_that_has_ended_is_not_alive(phase: str) -> None:
    read = read_pod(_pod(phase=phase))
    assert (read.alive, read.ready) == (False, False)


def test_a_pod_is_dead_when_its_ray_container_is_and_alive_when_only_a_sidecar_ended() -> None:
    ended = {"state": {"terminated": {"exitCode": 137}}}
    dead = read_pod(_pod(containerStatuses=[{"name": "ray", **ended}]))
    assert (dead.alive, dead.ended) == (False, "Error, exit code 137")
    assert read_pod(_pod(containerStatuses=[{"name": "side", **ended}])).alive


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        (
            {
                "containerStatuses": [
                    {
                        "name": "ray",
                        "state": {
                            "terminated": {
                                "reason": "StartError",
                                "exitCode": 128,
                                "message": 'exec: "pythn":\n not found',
                            }
                        },
                    }
                ]
            },
            'StartError, exit code 128: exec: "pythn": not found',
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "ray",
                        "state": {
                            "terminated": {"reason": "Error", "exitCode": 1, "message": "sk-1"}
                        },
                    }
                ]
            },
            "Error, exit code 1",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "fetch", "state": {"terminated": {"exitCode": 2}}},
                ]
            },
            "init container fetch: Error, exit code 2",
        ),
        ({"reason": "Evicted"}, "Evicted"),
        ({}, None),
    ],
)
def test_how_a_pod_ended(status: dict[str, Any], ended: str | None) -> None:
    read = read_pod(_pod(phase="Failed", **status))
    assert (read.alive, read.ended) == (False, ended)


def test_only_a_pod_that_is_evicted_from_a_silent_node_is_stranded() -> None:
    deleting = {**_pod(), "metadata": {**META, "deletionTimestamp": "2026-01-01T00:00:30Z"}}
    read = read_pod(deleting)
    assert (read.alive, read.stranded) == (False, False)
    assert read.deletion_deadline is not None
    taint = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    for silent in (False, True):
        ready = _ready("False", containers="True") if silent else _ready("True", containers="True")
        deleting["status"] = {"phase": "Running", "conditions": [*ready, taint]}
        assert read_pod(deleting).stranded is silent
    of_a_silent_node = {"phase": "Running", "conditions": _ready("False", containers="True")}
    assert not read_pod({**deleting, "status": of_a_silent_node}).stranded


@pytest.mark.parametrize(("seconds", "stranded"), [(30, True), (0, False)])
def test_a_lost_pod_that_stays_though_deleted_at_once_is_not_deleted_again(
    seconds: int, stranded: bool
) -> None:
    taint = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    obj = _pod(conditions=[*_ready("False", containers="True"), taint])
    deleted = {
        "deletionTimestamp": "2026-01-01T00:00:30Z",
        "deletionGracePeriodSeconds": seconds,
        "finalizers": ["example.com/holds"],
    }
    obj["metadata"] = {**META, **deleted}
    assert read_pod(trim(POD, obj)).stranded is stranded


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (
            {
                "containerStatuses": [
                    {"name": "ray", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
                ]
            },
            "ImagePullBackOff",
        ),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "no node has 8 GPUs",
                    }
                ]
            },
            "Unschedulable: no node has 8 GPUs",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "i", "state": {"waiting": {"reason": "PodInitializing"}}}
                ]
            },
            None,
        ),
    ],
)
def test_what_keeps_a_pod_from_starting(status: dict[str, Any], problem: str | None) -> None:
    assert read_pod(_pod(phase="Pending", **status)).problem == problem


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ({"observedGeneration": 2, "readyReplicas": 1, "updatedReplicas": 1}, True),
        ({"observedGeneration": 1, "readyReplicas": 1, "updatedReplicas": 1}, False),
        ({"observedGeneration": 2, "readyReplicas": 1}, False),
        ({"observedGeneration": 2, "updatedReplicas": 1}, False),
        ({}, False),
    ],
)
def test_a_deployment_is_ready_when_its_present_template_is(
    status: dict[str, Any], ready: bool
) -> None:
    assert deployment_is_ready({"metadata": META, "status": status}) is ready
    assert not deployment_is_ready(None)
