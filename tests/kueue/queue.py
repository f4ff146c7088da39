"""A queue of the real Kueue with room for one run, and workloads that preempt what is in it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from trainsync.api import names
from trainsync_operator.controller.priority_boosts import BOOST_ANNOTATION, JOB_UID_LABEL
from trainsync_operator.reconcile.run import PRIORITY_LABEL, QUEUE_LABEL

from demo.platform import REPOSITORY, Platform, devcluster_name
from devcluster.kueue import MANAGED_LABEL
from tests.e2e import harness
from tests.e2e.harness import NAMESPACE

QUEUE: Final = "one-run"
# Kueue gives it to what has none.
DEFAULT: Final = "default"
# Has room for two runs, and not for a workload of `preempt` beside.
PAIR: Final = "two-runs"
LOW, HIGH = "low", "high"
# Places its pods in the blocks of a topology.
PLACED: Final = "placed"
BLOCK: Final = "cloud.example/block"
HOST: Final = "kubernetes.io/hostname"
# What a run's pods ask of the topology, by the name of Kueue's set of pods.
ASKED: Final = {"head": {"preferred": BLOCK}, "trainer": {"required": HOST}}
_POD_SET: Final = "kueue.x-k8s.io/podset"
_ASKING: Final = "kueue.x-k8s.io/podset-{}-topology"
# A run of the tests has two pods of 50m.
_ROOMS: Final = {QUEUE: "150m", PAIR: "250m", PLACED: "150m"}
_KUEUE: Final = "kueue.x-k8s.io/v1beta2"
_SECONDS: Final = 60


def prepare(platform: Platform) -> None:
    """Kueue with the queue; repeatable."""
    name = devcluster_name(os.environ.get("KUBECONFIG"))
    command = [sys.executable, "-m", "devcluster", "--name", name, "kueue"]
    subprocess.run(command, cwd=REPOSITORY, timeout=1800, check=True)
    words = ("label", "--overwrite", "namespace", NAMESPACE, f"{MANAGED_LABEL}=true")
    platform.kubectl.run(*words)
    platform.kubectl.run("label", "--overwrite", "nodes", "--all", f"{BLOCK}=first")
    levels = [{"nodeLabel": BLOCK}, {"nodeLabel": HOST}]
    placed = {"nodeLabels": {BLOCK: "first"}, "topologyName": PLACED}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("Topology", PLACED, {"spec": {"levels": levels}}),
        ("ResourceFlavor", QUEUE, {"spec": {}}),
        ("ResourceFlavor", PLACED, {"spec": placed}),
        ("WorkloadPriorityClass", LOW, {"value": 10}),
        ("WorkloadPriorityClass", HIGH, {"value": 100}),
    ]
    for queue, cpu in _ROOMS.items():
        room = {"cpu": cpu, "memory": "64Gi"}
        resources = [{"name": name, "nominalQuota": quota} for name, quota in room.items()]
        flavor = {"name": PLACED if queue == PLACED else QUEUE, "resources": resources}
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": list(room), "flavors": [flavor]}],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        bodies += [
            ("ClusterQueue", queue, {"spec": spec}),
            ("LocalQueue", queue, {"spec": {"clusterQueue": queue}}),
        ]
    for kind, name, body in bodies:
        apply(platform, kind, name, body)


def apply(platform: Platform, kind: str, name: str, body: dict[str, Any]) -> None:
    """Apply an object of Kueue; its webhooks may still be coming up."""
    whole = {"apiVersion": _KUEUE, "kind": kind, "metadata": {"name": name}, **body}
    end = time.monotonic() + _SECONDS
    while True:
        try:
            platform.kubectl.apply(whole, namespace=NAMESPACE)
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def start(
    platform: Platform,
    name: str,
    priority: str | None,
    steps: int,
    *,
    queue: str = QUEUE,
    interval: int = 100_000,
    asks: bool = False,
    **policy: Any,
) -> harness.Run:
    """A run of one trainer, which with the default interval saves only when it is asked to.

    Args:
        priority: in the queue; None for a run that names no queue.
        asks: the pods ask for places in a topology, as `ASKED` has it.
    """
    command = f"python /opt/trainsync-e2e/workload.py --steps {steps} --trainers 1"
    run = harness.training_run(name, command, trainers=1, interval=interval)
    if priority is not None:
        run["metadata"]["labels"] = {QUEUE_LABEL: queue, PRIORITY_LABEL: priority}
    if asks:
        (cluster,) = run["spec"]["clusters"]
        owners = {"head": cluster["head"]} | {each["name"]: each for each in cluster["groups"]}
        for pods, asked in ASKED.items():
            annotations = {_ASKING.format(how): level for how, level in asked.items()}
            owners[pods]["template"]["metadata"] = {"annotations": annotations}
    run["spec"]["suspendPolicy"] = {"saveDeadlineSeconds": 60, **policy}
    platform.kubectl.apply(harness.workload_map(), platform.fit(run), namespace=NAMESPACE)
    return harness.Run(platform, name)


def label(run: harness.Run, text: str) -> None:
    """Set a label of the run."""
    run.kubectl.run("-n", NAMESPACE, "label", "--overwrite", names.PLURAL, run.name, text)


def waits(run: harness.Run) -> bool:
    """Whether the run says that it waits for a queue."""
    status = raw(run).get("status") or {}
    (ready,) = (c for c in status.get("conditions") or [{}] if c.get("type", "Ready") == "Ready")
    said = (ready.get("reason"), status.get("problem"))
    assert said == ("Queued", "Queued"), (said, ready.get("message"))
    return True


def tells_of_the_risk(run: harness.Run, last: int) -> bool:
    """Whether the status counts what was trained since the commit of step ``last`` as at risk."""
    status = raw(run)["status"]
    at_risk = (status.get("atRisk") or {}).get("steps")
    return bool(at_risk == status["progress"]["step"] - last > 0)


def are_held(run: harness.Run) -> bool:
    """Whether all of the run's Ray pods outlive a preemption."""
    selector = f"{names.LABEL_RUN}={run.name},{names.LABEL_COMPONENT}=ray"
    pods = run.kubectl.objects("pods", NAMESPACE, selector)
    lives = [pod["spec"]["containers"][0].get("lifecycle") or {} for pod in pods]
    return bool(lives) and all("preStop" in life for life in lives)


def has_what_was_asked(workload: dict[str, Any]) -> bool:
    """Whether a workload asks of the topology what its run does."""
    asked = {
        each["name"]: each.get("topologyRequest") or {} for each in workload["spec"]["podSets"]
    }
    assert asked.keys() == ASKED.keys()
    return all(asked[pods].items() >= wanted.items() for pods, wanted in ASKED.items())


def is_placed(platform: Platform, run: harness.Run) -> bool:
    """Whether each of the run's Ray pods runs where Kueue's assignment has its set of pods."""
    (workload,) = workloads(platform)
    assignments = workload["status"]["admission"]["podSetAssignments"]
    hosts = {each["name"]: _host(each["topologyAssignment"]) for each in assignments}
    assert hosts.keys() == ASKED.keys()
    selector = f"{names.LABEL_RUN}={run.name},{names.LABEL_COMPONENT}=ray"
    pods = run.kubectl.objects("pods", NAMESPACE, selector)
    told = {pod["metadata"]["labels"][_POD_SET]: pod for pod in pods}
    assert told.keys() == hosts.keys(), told.keys()
    for name, pod in told.items():
        spec = pod["spec"]
        where = (spec.get("nodeSelector") or {}).get(HOST), spec.get("nodeName")
        assert where == (hosts[name], hosts[name]), (name, where, spec.get("schedulingGates"))
    return True


def _host(assignment: dict[str, Any]) -> str:
    """The one host of an assignment, whose levels end with hosts."""
    assert assignment["levels"][-1] == HOST, assignment
    (piece,) = assignment["slices"]
    assert (piece["domainCount"], piece["podCounts"]) == (1, {"universal": 1}), assignment
    host: str = piece["valuesPerLevel"][-1]["universal"]
    return host


def workloads(platform: Platform) -> list[dict[str, Any]]:
    """All workloads of the runs' namespace."""
    found: list[dict[str, Any]] = platform.kubectl.objects(
        "workloads.kueue.x-k8s.io", NAMESPACE, ""
    )
    return found


def boost(platform: Platform, run: harness.Run) -> int:
    """How much the priority of the run's workload is raised."""
    uids = {
        cluster["metadata"]["uid"]
        for cluster in platform.kubectl.objects(
            "rayclusters", NAMESPACE, f"{names.LABEL_RUN}={run.name}"
        )
    }
    metadata = [workload["metadata"] for workload in workloads(platform)]
    (mine,) = (m for m in metadata if (m.get("labels") or {}).get(JOB_UID_LABEL) in uids)
    return int((mine.get("annotations") or {}).get(BOOST_ANNOTATION, 0))


def preempt(platform: Platform, name: str, queue: str = QUEUE) -> None:
    """Take the queue's room, as another workload of high priority does."""
    container = {"name": "c", "image": "none:1", "resources": {"requests": {"cpu": "100m"}}}
    pod = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    spec = {
        "queueName": queue,
        "priority": 100,
        "priorityClassRef": {
            "group": "kueue.x-k8s.io",
            "kind": "WorkloadPriorityClass",
            "name": HIGH,
        },
        "podSets": [{"name": "main", "count": 1, "template": pod}],
    }
    apply(platform, "Workload", name, {"spec": spec})


def until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    """Wait for a condition; fail at a timeout."""
    end = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            if condition():
                return
        except AssertionError as error:
            last = error
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s; last: {last}"
        time.sleep(0.5)


def conditions(workload: dict[str, Any]) -> dict[str, str]:
    """The status of each condition of a workload."""
    found = (workload.get("status") or {}).get("conditions") or []
    return {condition["type"]: condition["status"] for condition in found}


def steps_of(run: harness.Run) -> list[int]:
    """The steps in the order in which they were trained, over all attempts."""
    return [line["step"] for line in run.journal() if line["event"] == "step"]


def describe(run: harness.Run) -> str:
    """What ``kubectl describe`` tells of a run."""
    text: str = run.kubectl.run("-n", NAMESPACE, "describe", names.PLURAL, run.name)
    return text


def raw(run: harness.Run) -> dict[str, Any]:
    """The run as the API server has it."""
    text = run.kubectl.run("-n", NAMESPACE, "get", names.PLURAL, run.name, "-o", "json")
    found: dict[str, Any] = json.loads(text)
    return found
