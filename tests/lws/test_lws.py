"""Servers of two nodes in pods of the real LWS: made, counted, replaced, scaled, removed.

Not part of `make test`: `make test-lws` builds LWS first. A stand-in is in the place of vLLM.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from trainsync.api import env, names
from trainsync_operator.builders.servers.hosts import LABEL_RANK
from trainsync_operator.builders.servers.pod import AGENT
from trainsync_operator.kube.kinds import LEADER_WORKER_SET

from demo.platform import REPOSITORY, Platform, devcluster_name
from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed, served
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.prepared import prepared
from tests.lws.stand_in import ENGINE, commit, entry

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.usefixtures("crd")]

NO_IMAGE = "localhost/trainsync/none:1"
RUN = "large"
NAME = names.server_name(RUN, "rollout")
KIND = LEADER_WORKER_SET.plural
FIRST, SECOND = f"{NAME}-0", f"{NAME}-0-1"
READ = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=9).read().decode())"
OF_SERVERS = f"{names.LABEL_RUN}={RUN},{names.LABEL_COMPONENT}=server"


@pytest.fixture(scope="module")
def platform(kubeconfig: str) -> Platform:
    """The tests' cluster with this tree's images, and with LWS."""
    made = prepared()
    name = devcluster_name(os.environ.get("KUBECONFIG"))
    command = [sys.executable, "-m", "devcluster", "--name", name, "lws"]
    subprocess.run(command, cwd=REPOSITORY, timeout=1800, check=True)
    return made


@pytest.fixture(scope="module")
def operator(
    platform: Platform, module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(
        module_namespace, directory, NO_IMAGE, leader_elect=False, leader_worker_sets=True
    ) as process:
        yield process


@pytest.fixture(scope="module")
def ns(
    platform: Platform, module_namespace: Kubectl, operator: OperatorProcess
) -> Iterator[Kubectl]:
    """The operator's namespace, with a run that has one server of two nodes."""
    done = module_namespace.apply(manifest(platform))
    assert done.returncode == 0, done.stderr
    wait_until("its set is there", lambda: module_namespace.get(KIND, NAME) is not None)
    yield module_namespace
    module_namespace("delete", "trainingrun", RUN, "--wait=false", "--ignore-not-found")


def manifest(platform: Platform, **changes: Any) -> dict[str, Any]:
    run = changed(served(RUN), "spec.clusters.0.image", NO_IMAGE)
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    run = changed(run, "spec.checkpoint.storage", storage)
    return changed(run, "spec.servers", [entry(platform, RUN, "rollout", **changes)])


def pods(ns: Kubectl) -> dict[str, dict[str, Any]]:
    """The pods of servers that stay, by name."""
    found = ns.list("pod", OF_SERVERS)
    stay = (pod for pod in found if "deletionTimestamp" not in pod["metadata"])
    return {pod["metadata"]["name"]: pod for pod in stay}


def uids(ns: Kubectl) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods(ns).items()}


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)


def ready_leaders(ns: Kubectl) -> set[str]:
    """Uids of the first nodes that are ready."""
    leaders = (pod for pod in pods(ns).values() if pod["metadata"]["labels"][LABEL_RANK] == "0")
    return {pod["metadata"]["uid"] for pod in leaders if is_ready(pod)}


def status(ns: Kubectl) -> dict[str, Any]:
    run = ns.get("trainingrun", RUN)
    assert run is not None
    found: dict[str, Any] = run["status"]
    return found


def all_ready(ns: Kubectl, count: int) -> bool:
    """Whether the status and the Service say that so many servers are ready."""
    now = status(ns)
    (ready,) = (c for c in now["conditions"] if c["type"] == "ServersReady")
    told = (now["readyServers"], ready["reason"]) == (f"{count}/{count}", "AllReady")
    return told and len(routed(ns)) == count


def routed(ns: Kubectl) -> set[str]:
    """Names of the pods that the Service routes to."""
    slices = ns.list("endpointslice", f"kubernetes.io/service-name={NAME}")
    ends = (end for one in slices for end in one.get("endpoints") or [])
    return {end["targetRef"]["name"] for end in ends if end["conditions"]["ready"]}


def said(ns: Kubectl, pod: str, container: str, *command: str) -> str:
    return ns("exec", pod, "-c", container, "--", *command).strip()


def restarts(ns: Kubectl, pod: str, container: str) -> int:
    state = pods(ns)[pod]["status"]
    every = [*state["initContainerStatuses"], *state["containerStatuses"]]
    (found,) = (one["restartCount"] for one in every if one["name"] == container)
    return int(found)


def test_a_server_is_ready_once_both_nodes_have_joined(ns: Kubectl) -> None:
    wait_until("the server is ready", lambda: all_ready(ns, 1), 180)
    assert uids(ns).keys() == {FIRST, SECOND}
    assert routed(ns) == {FIRST}, "the other node has no endpoint"
    budget = ns.get("poddisruptionbudget", NAME)
    assert budget is not None
    assert budget["status"]["expectedPods"] == 1, "of first nodes"
    args = {name: pod["spec"]["containers"][0]["args"] for name, pod in pods(ns).items()}
    assert "--headless" not in args[FIRST]
    assert "--headless" in args[SECOND]


def test_the_agents_of_both_nodes_reach_one_another(ns: Kubectl) -> None:
    port, address = names.AGENT_PORT, f"{FIRST}.{ns.namespace}.svc"
    others = said(ns, FIRST, AGENT, "printenv", env.AGENT_OTHER_HOSTS)
    assert others == f"http://{SECOND}.{address}:{port}"
    leader = said(ns, SECOND, AGENT, "printenv", env.AGENT_LEADER)
    assert leader == f"http://{FIRST}.{address}:{port}"
    staged = said(ns, FIRST, AGENT, "python3", "-c", READ, f"{others}/staged.json")
    assert json.loads(staged)["tag"] is None

    def follows() -> bool:
        own = f"http://{pods(ns)[SECOND]['status']['podIP']}:{port}/status.json"
        found = json.loads(said(ns, SECOND, AGENT, "python3", "-c", READ, own))
        return found["leader"] == leader and found["leaderError"] is None

    wait_until("the other agent asks the first one", follows)


def test_a_version_is_loaded_from_the_memory_of_both_nodes(ns: Kubectl) -> None:
    said(ns, FIRST, AGENT, "python3", "-c", commit(7))

    def status_of(node: str) -> dict[str, Any]:
        url = f"http://{pods(ns)[node]['status']['podIP']}:{names.AGENT_PORT}/status.json"
        found: dict[str, Any] = json.loads(said(ns, node, AGENT, "python3", "-c", READ, url))
        return found

    def has_loaded() -> bool:
        first, other = status_of(FIRST), status_of(SECOND)
        return first["version"] == 7 and first["serverSays"] == other["staged"] is not None

    wait_until("the server has loaded what the other node has staged", has_loaded, 120)
    wait_until("the server is ready", lambda: all_ready(ns, 1), 60)


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_an_agent_that_begins_again_costs_no_server(ns: Kubectl, name: str) -> None:
    before, agents = uids(ns), restarts(ns, name, AGENT)
    said(ns, name, AGENT, "sh", "-c", "kill 1")
    wait_until("it began again", lambda: restarts(ns, name, AGENT) > agents)
    wait_until("the server is ready", lambda: all_ready(ns, 1), 120)
    assert uids(ns) == before
    assert restarts(ns, FIRST, ENGINE) == restarts(ns, SECOND, ENGINE) == 0


@pytest.mark.parametrize("name", [SECOND, FIRST])
@pytest.mark.parametrize("how", ["pod", "process"])
def test_a_server_that_loses_a_node_begins_anew_with_all(
    ns: Kubectl, name: str, how: str, operator: OperatorProcess
) -> None:
    wait_until("the server is ready", lambda: all_ready(ns, 1), 120)
    before = uids(ns)
    if how == "pod":
        ns("delete", "pod", name, "--wait=false")
    else:
        said(ns, name, ENGINE, "sh", "-c", "kill 1")

    def anew() -> bool:
        now = uids(ns)
        return now.keys() == before.keys() and not set(now.values()) & set(before.values())

    wait_until("both pods are others", anew, 120)
    wait_until("the server is ready", lambda: all_ready(ns, 1), 180)
    events = ns("get", "events", "--field-selector", f"involvedObject.name={RUN}")
    if (name, how) != (FIRST, "pod"):  # then LWS's part is enough
        assert "ServerReplaced" in events


def test_servers_are_scaled_and_replaced_and_the_trainers_go_on(
    ns: Kubectl, platform: Platform
) -> None:
    ray = ns.get("raycluster", f"{RUN}-main-0")
    assert ray is not None
    before = uids(ns)
    assert ns.apply(manifest(platform, replicas=2)).returncode == 0
    wait_until("two servers are ready", lambda: all_ready(ns, 2), 180)
    assert uids(ns).items() > before.items(), "the first one went on"

    old = ready_leaders(ns)
    assert ns.apply(manifest(platform, replicas=2, release="two")).returncode == 0
    fewest: list[int] = []

    def replaced() -> bool:
        now = ready_leaders(ns)
        fewest.append(len(now))
        return not now & old and len(pods(ns)) == 4 and all_ready(ns, 2)

    wait_until("both are replaced", replaced, 360)
    assert min(fewest) >= 2, fewest
    found = ns.get(KIND, NAME)
    assert found is not None
    assert found["spec"]["replicas"] == 2

    ns("scale", KIND, NAME, "--replicas=5")
    wait_until("what the spec says holds", lambda: ns.get(KIND, NAME)["spec"]["replicas"] == 2)  # type: ignore[index]
    after = ns.get("raycluster", f"{RUN}-main-0")
    assert after is not None
    assert after["metadata"]["uid"] == ray["metadata"]["uid"]
    assert status(ns)["attempt"] == 0


def test_a_run_that_is_deleted_leaves_nothing_of_its_servers(ns: Kubectl) -> None:
    ns("delete", "trainingrun", RUN, "--wait=false")
    wait_until("nothing is left", lambda: not left_over(ns, RUN), 120)
    for kind in (KIND, "statefulset", "pod"):
        wait_until(f"no {kind}", lambda k=kind: ns.list(k) == [], 60)
    of_lws = "leaderworkerset.sigs.k8s.io/name"
    wait_until("no Service of LWS", lambda: ns.list("service", of_lws) == [], 60)
