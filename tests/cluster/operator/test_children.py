"""The operator against a real API server: creation, drift and deletion of children.

No Ray pod must become ready here, so the images need not exist.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config
from trainsync.api import names
from trainsync.kube.client import KubeError
from trainsync.monitor.kube.client import ClusterApi

from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed, minimal
from tests.cluster.operator.operator_process import OperatorProcess, binding_name, running_operator

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(420),
    pytest.mark.usefixtures("crd"),
]

NO_IMAGE = "localhost/trainsync/none:1"
QUEUE = {"yunikorn.apache.org/queue": "root.rl"}
GANG = {"scheduling.k8s.io/group-name": "mine"}
# Kueue makes a RayCluster's Workload of what its pod templates are annotated with.
TOPOLOGY = {"kueue.x-k8s.io/podset-required-topology": "cloud.example/block"}
NOTE = {
    "note": "two\n\tlines: 'é' \u2028 \U0001f3d6\ufe0f \\ud83c"
}  # with an emoji, as gloo's errors
CLAIM = "spec.checkpoint.storage.volumeClaimTemplate"
CHILDREN = {
    "persistentvolumeclaim": "{run}-checkpoints",
    "serviceaccount": "{run}-monitor",
    "rolebinding": binding_name("{run}"),
    "service": "{run}-monitor",
    "deployment": "{run}-monitor",
    "raycluster": "{run}-main-0",
}


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, NO_IMAGE) as process:
        yield process


@pytest.fixture(scope="module")
def ns(module_namespace: Kubectl, operator: OperatorProcess) -> Kubectl:
    """The operator's namespace."""
    return module_namespace


def manifest(name: str) -> dict[str, Any]:
    run = changed(minimal(name), "spec.clusters.0.image", NO_IMAGE)
    run = changed(run, "spec.clusters.0.groups.1", {"name": "explorer", "role": "Explorer"})
    template = {"metadata": {"annotations": TOPOLOGY}}
    run = changed(run, "spec.clusters.0.groups.0.template", template)
    run = changed(run, "metadata.labels", QUEUE)
    head = {"metadata": {"annotations": GANG | NOTE}, "spec": {"containers": [{"name": "ray"}]}}
    run = changed(run, "spec.clusters.0.head.template", head)
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    return changed(run, "spec.checkpoint.storage", storage)


def create(ns: Kubectl, name: str) -> dict[str, Any]:
    done = ns.apply(manifest(name))
    assert done.returncode == 0, done.stderr
    wait_until(f"all children of {name} are there", lambda: not missing(ns, name))
    run = ns.get("trainingrun", name)
    assert run is not None
    return run


def missing(ns: Kubectl, run: str) -> list[str]:
    return [kind for kind, name in CHILDREN.items() if ns.get(kind, name.format(run=run)) is None]


def delete(ns: Kubectl, name: str) -> None:
    ns("delete", "trainingrun", name, "--wait=false")
    wait_until(f"nothing is left of {name}", lambda: not left_over(ns, name), 90)


@pytest.fixture(scope="module")
def run(ns: Kubectl) -> Iterator[dict[str, Any]]:
    yield create(ns, "shared")
    delete(ns, "shared")


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_belongs_to_the_run_and_carries_its_label(
    kind: str, ns: Kubectl, run: dict[str, Any]
) -> None:
    child = ns.get(kind, CHILDREN[kind].format(run="shared"))
    assert child is not None
    (owner,) = child["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (run["metadata"]["uid"], True)
    assert child["metadata"]["labels"][names.LABEL_RUN] == "shared"


def test_the_status_says_what_the_run_waits_for(ns: Kubectl, run: dict[str, Any]) -> None:
    def waits() -> bool:
        now = ns.get("trainingrun", "shared")
        assert now is not None
        ready = next(c for c in now["status"]["conditions"] if c["type"] == "Ready")
        return now["status"]["phase"] == "Starting" and "monitor" in ready["message"]

    wait_until("the status speaks of the monitor", waits)
    events = ns("get", "events", "--field-selector", "involvedObject.name=shared")
    assert "The run was taken up." in events


def test_a_bad_image_shows_in_the_table_of_runs(ns: Kubectl, run: dict[str, Any]) -> None:
    waiting = "{.items[*].status.containerStatuses[*].state.waiting.reason}"
    pods = ("get", "pods", "-l", f"{names.LABEL_RUN}=shared", "-o", f"jsonpath={waiting}")
    wait_until("a pod lacks its image", lambda: "ImagePull" in ns(*pods))
    wait_until("the table says so", lambda: "ImagePull" in ns("get", "tr", "shared"), 15)


def test_a_pod_on_a_lost_node_is_deleted_at_once_and_told_of(
    ns: Kubectl, run: dict[str, Any]
) -> None:
    ray = ns.get("raycluster", "shared-main-0")
    assert ray is not None
    labels = {
        names.LABEL_CLUSTER: "main",
        names.LABEL_GROUP: "explorer",
        names.LABEL_ROLE: "Explorer",
        names.LABEL_ATTEMPT: "0",
    }
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "controller": True}
    owner |= {"name": "shared-main-0", "uid": ray["metadata"]["uid"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "stranded",
            "labels": {names.LABEL_RUN: "shared", **labels},
            "ownerReferences": [owner],
        },
        # No kubelet answers for this node.
        "spec": {"nodeName": "lost", "containers": [{"name": "ray", "image": NO_IMAGE}]},
    }
    assert ns.apply(pod).returncode == 0
    ns("delete", "pod", "stranded", "--grace-period=600", "--wait=false")
    conditions = [
        {"type": "Ready", "status": "False"},
        {"type": "ContainersReady", "status": "True"},
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
    ]
    patch = json.dumps({"status": {"phase": "Running", "conditions": conditions}})
    ns("patch", "pod", "stranded", "--subresource=status", "--type=merge", "-p", patch)
    wait_until("the pod is gone", lambda: ns.get("pod", "stranded") is None, 20)
    told = ("get", "events", "--field-selector", "involvedObject.name=shared")
    wait_until("an Event says so", lambda: "LostPodDeleted" in ns(*told), 10)


def test_kubectl_scale_changes_the_explorers_and_nothing_else(
    ns: Kubectl, run: dict[str, Any]
) -> None:
    def seen() -> dict[str, Any]:
        ray = ns.get("raycluster", "shared-main-0")
        assert ray is not None
        counts = {g["groupName"]: g["replicas"] for g in ray["spec"]["workerGroupSpecs"]}
        return {"uid": ray["metadata"]["uid"], **counts}

    before = seen()
    for replicas in (3, 2):
        ns("scale", "trainingrun", "shared", f"--replicas={replicas}")
        wanted = {**before, "explorer": replicas}
        wait_until(f"{replicas} explorers are asked for", lambda: seen() == wanted)  # noqa: B023
    now = ns.get("trainingrun", "shared")
    assert now is not None
    assert now["status"]["attempt"] == 0
    scale = json.loads(ns("get", "--raw", f"{path_of(now)}/scale"))
    assert scale["spec"]["replicas"] == 2
    assert scale["status"]["selector"] == f"{names.LABEL_RUN}=shared,{names.LABEL_ROLE}=Explorer"


def test_what_batch_schedulers_read_reaches_the_ray_cluster_and_the_pods(
    ns: Kubectl, run: dict[str, Any]
) -> None:
    ray = ns.get("raycluster", "shared-main-0")
    assert ray is not None
    assert ray["metadata"]["labels"].items() >= QUEUE.items()
    of_trainers = ray["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["annotations"]
    assert of_trainers.items() >= TOPOLOGY.items()

    def annotated(role: str, wanted: dict[str, str]) -> bool:
        pods = ns.list("pod", f"{names.LABEL_RUN}=shared,{names.LABEL_ROLE}={role}")
        return any(
            (pod["metadata"].get("annotations") or {}).items() >= wanted.items() for pod in pods
        )

    for role, wanted in (("Head", GANG), ("Trainer", TOPOLOGY)):
        there = f"the pod of role {role} is there"
        wait_until(there, lambda r=role, w=wanted: annotated(r, w))


def test_any_text_of_a_template_reaches_the_ray_cluster(ns: Kubectl, run: dict[str, Any]) -> None:
    ray = ns.get("raycluster", "shared-main-0")
    assert ray is not None
    told = ray["spec"]["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert told.items() >= NOTE.items()


def test_a_run_that_is_to_go_deletes_itself_and_its_claim_outlives_it(ns: Kubectl) -> None:
    brief = changed(manifest("brief"), f"{CLAIM}.retentionPolicy", "Retain")
    brief = changed(brief, "spec.failurePolicy", {"activeDeadlineSeconds": 5})
    done = ns.apply(changed(brief, "spec.deleteAfterFinishedSeconds", 0))
    assert done.returncode == 0, done.stderr
    claim = "persistentvolumeclaim/brief-checkpoints"
    wait_until("the claim is made", lambda: ns.get(*claim.split("/")) is not None)
    wait_until("the run is gone", lambda: ns.get("trainingrun", "brief") is None)
    wait_until("the claim alone is left", lambda: left_over(ns, "brief") == [claim], 90)
    ns("delete", claim)


def path_of(run: dict[str, Any]) -> str:
    meta = run["metadata"]
    return f"/apis/{names.API_VERSION}/namespaces/{meta['namespace']}/trainingruns/{meta['name']}"


# a patch of each kind of child, and the condition that must hold again
DRIFT: dict[str, tuple[dict[str, Any], str, Any]] = {
    "serviceaccount": ({"metadata": {"labels": {names.LABEL_RUN: None}}}, "", None),
    "rolebinding": ({"subjects": []}, "subjects.0.name", "shared-monitor"),
    "service": ({"spec": {"selector": {"x": "y"}}}, f"spec.selector.{names.LABEL_RUN}", "shared"),
    "deployment": ({"spec": {"replicas": 0}}, "spec.replicas", 1),
    "persistentvolumeclaim": ({"metadata": {"labels": {names.LABEL_RUN: "x"}}}, "", None),
    "raycluster": ({"spec": {"rayVersion": "1.0.0"}}, "spec.rayVersion", "2.60.0"),
}


def _at(obj: Any, path: str) -> Any:
    keys = path.replace(names.LABEL_RUN, "LABEL").split(".")
    for key in keys:
        name = names.LABEL_RUN if key == "LABEL" else key
        try:
            obj = obj[int(name)] if isinstance(obj, list) else obj[name]
        except (KeyError, IndexError, TypeError):
            return None
    return obj


@pytest.mark.parametrize("kind", DRIFT)
def test_a_child_that_was_changed_is_put_right(kind: str, ns: Kubectl, run: dict[str, Any]) -> None:
    patch, path, value = DRIFT[kind]
    name = CHILDREN[kind].format(run="shared")
    ns("patch", kind, name, "--type=merge", "-p", json.dumps(patch))

    def right() -> bool:
        child = ns.get(kind, name)
        assert child is not None
        labelled = (child["metadata"].get("labels") or {}).get(names.LABEL_RUN) == "shared"
        return labelled and (not path or _at(child, path) == value)

    wait_until(f"{kind} {name} is right again", right)


@pytest.mark.parametrize("kind", [kind for kind in CHILDREN if kind != "persistentvolumeclaim"])
def test_a_child_that_was_deleted_is_made_again(
    kind: str, ns: Kubectl, run: dict[str, Any]
) -> None:
    name = CHILDREN[kind].format(run="shared")
    before = ns.get(kind, name)
    assert before is not None
    ns("delete", kind, name, "--wait=false")

    def again() -> bool:
        child = ns.get(kind, name)
        return child is not None and child["metadata"]["uid"] != before["metadata"]["uid"]

    wait_until(f"{kind} {name} is there again", again)


def test_a_changed_status_is_restored(ns: Kubectl, run: dict[str, Any]) -> None:
    patch = {"status": {"phase": "Complete", "readyClusters": "9/9"}}
    words = ("--subresource=status", "--type=merge", "-p", json.dumps(patch))
    ns("patch", "trainingrun", "shared", *words)

    def right() -> bool:
        now = ns.get("trainingrun", "shared")
        assert now is not None
        status = now["status"]
        return (status["phase"], status["readyClusters"]) == ("Starting", "0/1")

    wait_until("the status is right again", right)


def test_the_monitors_status_writes_cause_no_reconcile(
    ns: Kubectl, operator: OperatorProcess, run: dict[str, Any]
) -> None:
    def report(step: int) -> None:
        progress = {"step": step, "lastReportTime": "2020-01-01T00:00:00Z"}
        ns.patch("trainingrun", "shared", {"status": {"progress": progress}}, "status")

    def reconciles() -> float:
        return operator.metric("trainsync_operator_reconciles_total")

    def calm() -> bool:
        before = reconciles()
        time.sleep(3)
        return reconciles() == before

    report(0)
    wait_until("the children that tests before made anew are at rest", calm, 120)

    def few() -> bool:
        start = reconciles()
        for step in range(30):
            report(step + 1)
        # Pods with image pull errors cause reconciles, too, the more of them the longer it takes,
        # and ever less often.
        return reconciles() < start + 15

    wait_until("thirty writes come with few reconciles", few, 120)


def test_health_and_metrics_are_served(operator: OperatorProcess, run: dict[str, Any]) -> None:
    assert operator.read("/healthz") == "ok"
    assert operator.read("/readyz") == "ok"
    shown = operator.read("/metrics")
    assert 'trainsync_run_info{attempt="0",namespace="' in shown
    assert 'run="shared",type="Ready"' in shown


def test_two_runs_at_once_do_not_mix(ns: Kubectl, run: dict[str, Any]) -> None:
    other = create(ns, "other")
    for kind, name in CHILDREN.items():
        child = ns.get(kind, name.format(run="other"))
        assert child is not None
        assert child["metadata"]["ownerReferences"][0]["uid"] == other["metadata"]["uid"]
    delete(ns, "other")
    assert missing(ns, "shared") == []


def test_a_suspended_run_has_no_ray_cluster_and_can_be_deleted(ns: Kubectl) -> None:
    create(ns, "sleeper")
    suspend = json.dumps({"spec": {"suspend": True}})
    ns("patch", "trainingrun", "sleeper", "--type=merge", "-p", suspend)

    def suspended() -> bool:
        now = ns.get("trainingrun", "sleeper")
        assert now is not None
        return now["status"]["phase"] == "Suspended" and missing(ns, "sleeper") == ["raycluster"]

    wait_until("it is suspended", suspended)
    resume = json.dumps({"spec": {"suspend": False}})
    ns("patch", "trainingrun", "sleeper", "--type=merge", "-p", resume)
    wait_until("it has a new cluster", lambda: ns.get("raycluster", "sleeper-main-1"))
    now = ns.get("trainingrun", "sleeper")
    assert now is not None
    assert (now["status"]["attempt"], now["status"]["restarts"]) == (1, 0)
    ns("patch", "trainingrun", "sleeper", "--type=merge", "-p", suspend)
    wait_until("its clusters are gone", lambda: ns.get("raycluster", "sleeper-main-1") is None)
    delete(ns, "sleeper")


def test_a_run_that_is_deleted_right_after_it_was_made_leaves_nothing(ns: Kubectl) -> None:
    for number in range(3):
        done = ns.apply(manifest(f"brief-{number}"))
        assert done.returncode == 0, done.stderr
        time.sleep(0.15 * number)  # at different points of the first reconcile
        delete(ns, f"brief-{number}")


def test_foreground_deletion_leaves_nothing(ns: Kubectl) -> None:
    create(ns, "orderly")
    ns("delete", "trainingrun", "orderly", "--cascade=foreground", "--wait=false")
    wait_until("nothing is left", lambda: not left_over(ns, "orderly"), 90)
    wait_until("the run is gone", lambda: ns.get("trainingrun", "orderly") is None)


async def connect(kubeconfig: str) -> kubernetes_client.ApiClient:
    settings = kubernetes_client.Configuration()
    await config.load_kube_config(kubeconfig, client_configuration=settings)
    return kubernetes_client.ApiClient(settings)


def progress(step: int) -> dict[str, Any]:
    return {"progress": {"step": step, "lastReportTime": "2026-11-29T00:00:00Z"}}


async def test_a_namesake_of_a_deleted_run_has_children_of_its_own_and_no_status_of_its_monitor(
    ns: Kubectl,
) -> None:
    old = create(ns, "again")
    assert ns.namespace is not None
    async with await connect(ns.kubeconfig) as client:
        monitor = ClusterApi(client, namespace=ns.namespace, run="again")
        await monitor.apply_status(old["metadata"]["uid"], progress(1))
        ns("delete", "trainingrun", "again", "--wait=false")
        wait_until("the old run is gone", lambda: ns.get("trainingrun", "again") is None)
        done = ns.apply(manifest("again"))
        assert done.returncode == 0, done.stderr
        with pytest.raises(KubeError, match="and not " + old["metadata"]["uid"]) as late:
            await monitor.apply_status(old["metadata"]["uid"], progress(2))
        assert late.value.status == 409

    def all_new() -> bool:
        new = ns.get("trainingrun", "again")
        assert new is not None
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        children = [ns.get(kind, name.format(run="again")) for kind, name in CHILDREN.items()]
        return all(
            child is not None
            and child["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]
            for child in children
        )

    wait_until("all children belong to the new run", all_new, 90)
    new = ns.get("trainingrun", "again")
    assert new is not None
    assert "progress" not in new["status"]
    delete(ns, "again")


def test_an_object_of_another_owner_stays_unchanged_and_is_named(ns: Kubectl) -> None:
    ns("create", "serviceaccount", "taken-monitor")
    done = ns.apply(manifest("taken"))
    assert done.returncode == 0, done.stderr

    def said() -> bool:
        now = ns.get("trainingrun", "taken")
        assert now is not None
        conditions = (now.get("status") or {}).get("conditions") or []
        return any(
            c["reason"] == "NameTaken" and "ServiceAccount taken-monitor" in c["message"]
            for c in conditions
        )

    wait_until("the status names the object", said)
    account = ns.get("serviceaccount", "taken-monitor")
    assert account is not None
    assert "ownerReferences" not in account["metadata"]
    ns("delete", "serviceaccount", "taken-monitor")
    wait_until("the run goes on", lambda: not missing(ns, "taken"))
    delete(ns, "taken")


def test_a_template_that_the_api_server_refuses_is_reported_in_the_status(ns: Kubectl) -> None:
    bad = {"spec": {"containers": [{"name": "ray", "image": NO_IMAGE, "nonsense": 1}]}}
    run = changed(manifest("bad"), "spec.clusters.0.groups.0.template", bad)
    done = ns.apply(run)
    assert done.returncode == 0, done.stderr

    def said() -> bool:
        now = ns.get("trainingrun", "bad")
        assert now is not None
        conditions = (now.get("status") or {}).get("conditions") or []
        return any(c["reason"] == "Refused" and "nonsense" in c["message"] for c in conditions)

    wait_until("the status names the field", said)
    other = {"spec": {"containers": [{"name": "ray", "image": NO_IMAGE, "rubbish": 1}]}}
    done = ns.apply(changed(manifest("bad"), "spec.clusters.0.groups.0.template", other))
    assert done.returncode == 0, done.stderr

    def counted() -> bool:
        events = [e for e in ns.list("events") if e["involvedObject"]["name"] == "bad"]
        (refused,) = [event for event in events if event["reason"] == "Refused"]
        return refused["count"] == 2 and "rubbish" in refused["message"]

    wait_until("the same Event tells of the next field, and counts", counted)
    refused = ns.get("trainingrun", "bad")
    assert ns.apply(manifest("bad")).returncode == 0
    wait_until("the mended run has all children", lambda: not missing(ns, "bad"))
    begun = ns.get("trainingrun", "bad")
    assert refused is not None
    assert begun is not None
    assert begun["status"]["startTime"] == refused["status"]["startTime"], "a refusal restarts it"
    delete(ns, "bad")


def test_an_operator_killed_in_a_reconcile_and_started_again_finishes_the_work(
    kubectl: Kubectl, namespace: Kubectl, tmp_path: Path
) -> None:
    # Without leader election: each successor would wait for the Lease to expire.
    operator = OperatorProcess(namespace, tmp_path, NO_IMAGE, leader_elect=False)
    chance = random.Random(3)
    try:
        for number in range(4):
            operator.start()
            done = namespace.apply(manifest(f"crash-{number}"))
            assert done.returncode == 0, done.stderr

            def begun(name: str = f"crash-{number}") -> bool:
                return namespace.get("serviceaccount", f"{name}-monitor") is not None

            if number:
                wait_until("the reconcile has begun", begun)
                time.sleep(chance.random() * 0.1)
            operator.kill()
        operator.start()
        for number in range(4):
            name = f"crash-{number}"
            wait_until(f"{name} is complete", lambda n=name: not missing(namespace, n), 60)
            run = namespace.get("trainingrun", name)
            assert run is not None
            selector = f"{names.LABEL_RUN}={name}"
            (cluster,) = namespace.list("raycluster", selector)
            assert cluster["metadata"]["name"] == f"{name}-main-0"
            assert run["status"]["attempt"] == 0
        assert operator.stop() == 0
        assert operator.complaints() == []
    finally:
        operator.stop()
