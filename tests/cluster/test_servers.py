"""Servers of a run against a real API server: made, healed, scaled, suspended, removed.

But for one test no pod must become ready here, so the images need not exist.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from trainsync.api import names

from demo.platform import Platform
from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.fake_server import fake_server
from tests.cluster.manifests import changed, served
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.prepared import prepared

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("crd")]

NO_IMAGE = "localhost/trainsync/none:1"
RUN = "served"
KINDS = ("service", "poddisruptionbudget", "deployment")
ROLLOUT, JUDGE = (names.server_name(RUN, name) for name in ("rollout", "judge"))
CONTAINER = {
    "name": "vllm",
    "image": NO_IMAGE,
    # Written in another way than the API server stores it.
    "env": [{"name": "EMPTY", "value": ""}],
    "resources": {"requests": {"cpu": "1m", "memory": "1024Ki"}},
}


@pytest.fixture(scope="module")
def platform() -> Platform:
    """The tests' cluster with this tree's images."""
    return prepared()


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, NO_IMAGE) as process:
        yield process


@pytest.fixture(scope="module")
def ns(module_namespace: Kubectl, operator: OperatorProcess) -> Iterator[Kubectl]:
    """The operator's namespace, with a run that has servers."""
    done = module_namespace.apply(manifest())
    assert done.returncode == 0, done.stderr
    wait_until("all children are there", lambda: children(module_namespace) == (ROLLOUT, JUDGE))
    wait_until("a Ray cluster, too", lambda: module_namespace.get("raycluster", f"{RUN}-main-0"))
    yield module_namespace
    module_namespace("delete", "trainingrun", RUN, "--wait=false")
    wait_until("nothing is left", lambda: not left_over(module_namespace, RUN), 90)


def manifest() -> dict[str, Any]:
    run = changed(served(RUN), "spec.clusters.0.image", NO_IMAGE)
    for entry in run["spec"]["servers"]:
        entry["template"] = {"spec": {"containers": [CONTAINER]}}
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    run = changed(run, "spec.checkpoint.storage", storage)
    return changed(run, "spec.suspendPolicy", {"saveDeadlineSeconds": 0})


def children(ns: Kubectl) -> tuple[str, ...]:
    """Names that are there of every kind, in the order of the manifest."""
    made = (ROLLOUT, JUDGE)
    return tuple(name for name in made if all(ns.get(kind, name) is not None for kind in KINDS))


def live(ns: Kubectl, name: str, kind: str = "deployment") -> dict[str, Any]:
    found = ns.get(kind, name)
    assert found is not None
    return found


def replicas(ns: Kubectl, name: str) -> int:
    found: int = live(ns, name)["spec"]["replicas"]
    return found


def status(ns: Kubectl) -> dict[str, Any]:
    found: dict[str, Any] = live(ns, RUN, "trainingrun")["status"]
    return found


def patch(ns: Kubectl, kind: str, name: str, change: dict[str, Any]) -> None:
    ns("patch", kind, name, "--type=merge", "-p", json.dumps(change))


def test_the_status_says_what_servers_lack(ns: Kubectl) -> None:
    def told() -> bool:
        now = status(ns)
        ready = next(c for c in now["conditions"] if c["type"] == "ServersReady")
        rollout = next(entry for entry in now["servers"] if entry["name"] == "rollout")
        return (
            ready["status"] == "False"
            and "Image" in rollout.get("message", "")
            and (rollout["replicas"], rollout["readyReplicas"]) == (2, 0)
        )

    wait_until("the status tells of the image", told)
    assert "0/3" in ns("get", "tr", RUN, "-o", "wide")
    assert "ServersCreated" in ns("get", "events", "--field-selector", f"involvedObject.name={RUN}")


def test_a_pod_of_servers_has_the_agent_beside_it(ns: Kubectl) -> None:
    selector = f"{names.LABEL_RUN}={RUN},{names.LABEL_SERVER}=rollout"
    wait_until("two pods", lambda: len(ns.list("pod", selector)) == 2)
    spec = ns.list("pod", selector)[0]["spec"]
    (agent,) = spec["initContainers"]
    assert (agent["restartPolicy"], agent["image"]) == ("Always", NO_IMAGE)
    assert {mount["mountPath"] for mount in agent["volumeMounts"]} == {
        names.CHECKPOINT_MOUNT, names.STAGING_MOUNT, names.TOKEN_DIRECTORY
    }  # fmt: skip


def test_nothing_is_applied_again_that_the_api_server_wrote_in_its_own_way(
    ns: Kubectl, operator: OperatorProcess
) -> None:
    def applied() -> float:
        lines = operator.read("/metrics").splitlines()
        of_servers = (line for line in lines if 'resource="deployments"' in line)
        return sum(
            float(line.split()[-1])
            for line in of_servers
            if line.startswith("trainsync_operator_api_requests_total") and 'verb="apply"' in line
        )

    def poked() -> None:
        # Not the Deployment, which is looked at once more after each change of it.
        patch(ns, "service", ROLLOUT, {"metadata": {"annotations": {"poked": "yes"}}})
        patch(ns, "service", ROLLOUT, {"metadata": {"annotations": {"poked": None}}})

    reconciles = "trainsync_operator_reconciles_total"
    made = operator.metric(reconciles)
    poked()
    wait_until("the operator has looked", lambda: operator.metric(reconciles) > made)
    before, looks = applied(), operator.metric(reconciles)
    for _ in range(5):
        poked()
    wait_until("it has looked again", lambda: operator.metric(reconciles) >= looks + 3, 90)
    assert applied() <= before + 2, "one for each Deployment, at most"


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_is_deleted_is_made_again(kind: str, ns: Kubectl) -> None:
    uid = live(ns, ROLLOUT, kind)["metadata"]["uid"]
    ns("delete", kind, ROLLOUT, "--wait=false")

    def again() -> bool:
        found = ns.get(kind, ROLLOUT)
        return found is not None and found["metadata"]["uid"] != uid

    wait_until(f"{kind} {ROLLOUT} is there again", again)


def test_the_spec_scales_some_and_kubectl_others_and_no_attempt_begins(ns: Kubectl) -> None:
    ray = live(ns, f"{RUN}-main-0", "raycluster")["metadata"]["uid"]
    ns("scale", "deployment", ROLLOUT, "--replicas=5")
    wait_until("what the spec says holds", lambda: replicas(ns, ROLLOUT) == 2)
    ns("scale", "deployment", JUDGE, "--replicas=3")
    edited = changed(manifest(), "spec.servers.0.replicas", 1)
    edited = changed(edited, "spec.servers.0.template.spec.containers.0.env.0.value", "other")
    assert ns.apply(edited).returncode == 0
    wait_until("the other is scaled by the spec", lambda: replicas(ns, ROLLOUT) == 1)
    assert replicas(ns, JUDGE) == 3, "who scales the Deployment decides"
    wait_until("the status says so", lambda: status(ns)["readyServers"] == "0/4")
    assert live(ns, f"{RUN}-main-0", "raycluster")["metadata"]["uid"] == ray
    assert status(ns)["attempt"] == 0


def test_a_suspended_run_has_no_servers_and_gets_back_as_many_as_it_had(ns: Kubectl) -> None:
    before = {name: replicas(ns, name) for name in (ROLLOUT, JUDGE)}
    patch(ns, "trainingrun", RUN, {"spec": {"suspend": True}})
    wait_until("no servers", lambda: all(replicas(ns, name) == 0 for name in before))
    selector = f"{names.LABEL_RUN}={RUN},{names.LABEL_COMPONENT}=server"
    wait_until("no pods of theirs", lambda: not ns.list("pod", selector), 60)
    patch(ns, "trainingrun", RUN, {"spec": {"suspend": False}})
    now = wait_until(
        "as many as before", lambda: {name: replicas(ns, name) for name in before} == before, 30
    )
    assert now


def test_a_template_that_the_api_server_refuses_stops_nothing_else(ns: Kubectl) -> None:
    wrong = changed(manifest(), "spec.servers.0.template.spec.containers.0.nonsense", 1)
    assert ns.apply(wrong).returncode == 0

    def told() -> bool:
        found = next(c for c in status(ns)["conditions"] if c["type"] == "ServersReady")
        ready = next(c for c in status(ns)["conditions"] if c["type"] == "Ready")
        return (
            found["reason"] == "Refused"
            and "nonsense" in found["message"]
            and ready["reason"] != "Refused"
        )

    wait_until("the condition names the field", told)
    assert ns.apply(manifest()).returncode == 0


def test_an_entry_that_is_removed_takes_its_children(ns: Kubectl) -> None:
    assert ns.apply(changed(manifest(), "spec.servers.0", ...)).returncode == 0
    for kind in KINDS:
        wait_until(f"no {kind}", lambda k=kind: ns.get(k, ROLLOUT) is None)
    assert children(ns) == (JUDGE,)
    assert ns.get("deployment", names.monitor_name(RUN)) is not None
    assert ns.get("service", names.monitor_name(RUN)) is not None


def with_agent(platform: Platform, run: dict[str, Any], release: str) -> dict[str, Any]:
    """A run with one server, of standard Python, that is ready before the first version."""
    # The run's monitor has no image, and makes no directory.
    claim = {"name": "trainsync-checkpoints", "mountPath": names.CHECKPOINT_MOUNT}
    make = {"name": "make", "image": platform.images.ray, "volumeMounts": [claim]}
    make["command"] = ["mkdir", "-p", f"{names.CHECKPOINT_MOUNT}/{RUN}"]
    entry = fake_server(platform, "real", release, before=[make])
    return changed(run, "spec.servers", [entry])


def test_a_pod_is_ready_as_its_agent_says_and_is_replaced_only_by_one_that_is(
    ns: Kubectl, platform: Platform
) -> None:
    name = names.server_name(RUN, "real")

    def ready() -> int:
        found: int = (live(ns, name).get("status") or {}).get("readyReplicas", 0)
        return found

    def pods() -> list[dict[str, Any]]:
        selector = f"{names.LABEL_RUN}={RUN},{names.LABEL_SERVER}=real"
        return ns.list("pod", selector)

    assert ns.apply(with_agent(platform, manifest(), "one")).returncode == 0
    wait_until("its Deployment", lambda: ns.get("deployment", name) is not None)
    wait_until("the server is ready", lambda: ready() == 1, 120)

    def told() -> bool:
        found = next(c for c in status(ns)["conditions"] if c["type"] == "ServersReady")
        return status(ns)["readyServers"] == "1/1" and found["reason"] == "AllReady"

    wait_until("the status says so", told)
    (before,) = pods()
    assert ns.apply(with_agent(platform, manifest(), "two")).returncode == 0
    served_by: set[str] = set()

    def replaced() -> bool:
        there = pods()
        served_by.update(pod["metadata"]["uid"] for pod in there if is_ready(pod))
        stays = [pod for pod in there if "deletionTimestamp" not in pod["metadata"]]
        if before["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in stays}:
            return False
        new = {pod["metadata"]["uid"] for pod in stays}
        if not new & served_by:
            pytest.fail("the server went before another one was ready")
        return True

    wait_until("another pod is in its place", replaced, 120)
    assert status(ns)["attempt"] <= 1, "that of the suspension before"


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)
