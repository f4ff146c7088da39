"""Servers of several nodes against a real API server, which has a CRD of LeaderWorkerSets or not.

No controller makes pods of them here: `make test-lws` has LWS itself.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.kube.kinds import LEADER_WORKER_SET

from tests.cluster.chart.helm import FIXTURES
from tests.cluster.conftest import Kubectl, left_over, served_without_controller, wait_until
from tests.cluster.manifests import changed, served
from tests.cluster.operator.operator_process import OperatorProcess, running_operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("crd")]

NO_IMAGE = "localhost/trainsync/none:1"
RUN = "large"
ROLLOUT, JUDGE = (names.server_name(RUN, name) for name in ("rollout", "judge"))
KIND = LEADER_WORKER_SET.plural
CRD = FIXTURES / "lws" / "leaderworkersets.yaml"


def manifest(run: str = RUN) -> dict[str, Any]:
    """One entry of servers of two nodes, one of servers of one."""
    made = changed(served(run), "spec.clusters.0.image", NO_IMAGE)
    container = {"name": "vllm", "image": NO_IMAGE, "command": ["vllm", "serve", "/model"]}
    for entry in made["spec"]["servers"]:
        entry["template"] = {"spec": {"containers": [container]}}
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    made = changed(made, "spec.checkpoint.storage", storage)
    return changed(made, "spec.servers.0.nodes", 2)


@pytest.fixture(scope="module")
def sets(kubectl: Kubectl) -> Iterator[None]:
    """The CRD; that of LWS itself stays as it is."""
    with served_without_controller(kubectl, CRD):
        yield


def condition(ns: Kubectl) -> dict[str, Any]:
    found = ns.get("trainingrun", RUN)
    assert found is not None
    (ready,) = (c for c in found["status"]["conditions"] if c["type"] == "ServersReady")
    return dict(ready)


def is_missing(ns: Kubectl, remedy: str) -> bool:
    found = condition(ns)
    return found["reason"] == "LeaderWorkerSetMissing" and remedy in found["message"]


def test_without_its_option_the_operator_makes_the_rest_and_says_what_is_missing(
    namespace: Kubectl, tmp_path: Any
) -> None:
    with running_operator(namespace, tmp_path, NO_IMAGE):
        assert namespace.apply(manifest()).returncode == 0
        wait_until("the other servers", lambda: namespace.get("deployment", JUDGE) is not None)
        wait_until("it is told", lambda: is_missing(namespace, "leaderWorkerSets.enabled"))
        wait_until("a Ray cluster", lambda: namespace.get("raycluster", f"{RUN}-main-0"))
        assert namespace.get("deployment", ROLLOUT) is None
        namespace("delete", "trainingrun", RUN, "--wait=false")


def test_where_no_crd_is_served_the_operator_goes_on_until_it_is(
    namespace: Kubectl, tmp_path: Any, kubectl: Kubectl, request: pytest.FixtureRequest
) -> None:
    if kubectl.run("get", KIND, "--all-namespaces").returncode == 0:
        pytest.skip("this cluster has LeaderWorkerSets")
    with running_operator(namespace, tmp_path, NO_IMAGE, leader_worker_sets=True):
        assert namespace.apply(manifest()).returncode == 0
        wait_until("it is told", lambda: is_missing(namespace, "install LWS"))
        wait_until("the other servers", lambda: namespace.get("deployment", JUDGE) is not None)
        wait_until("a Ray cluster", lambda: namespace.get("raycluster", f"{RUN}-main-0"))
        request.getfixturevalue("sets")
        wait_until("it is made", lambda: namespace.get(KIND, ROLLOUT) is not None, 90)
        namespace("delete", "trainingrun", RUN, "--wait=false")
        wait_until("it goes with the run", lambda: namespace.get(KIND, ROLLOUT) is None)


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, sets: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(
        module_namespace, directory, NO_IMAGE, leader_worker_sets=True
    ) as process:
        yield process


@pytest.fixture(scope="module")
def ns(module_namespace: Kubectl, operator: OperatorProcess) -> Iterator[Kubectl]:
    """The operator's namespace, with a run that has servers of two nodes."""
    done = module_namespace.apply(manifest())
    assert done.returncode == 0, done.stderr
    wait_until("its set is there", lambda: module_namespace.get(KIND, ROLLOUT) is not None)
    yield module_namespace
    module_namespace("delete", "trainingrun", RUN, "--wait=false")
    wait_until("nothing is left", lambda: not left_over(module_namespace, RUN), 90)
    wait_until("no set is", lambda: module_namespace.list(KIND) == [])


def replicas(ns: Kubectl) -> int:
    found = ns.get(KIND, ROLLOUT)
    assert found is not None
    count: int = found["spec"]["replicas"]
    return count


def is_seen(ns: Kubectl) -> bool:
    """Whether the operator has looked at the present spec."""
    run = ns.get("trainingrun", RUN)
    assert run is not None
    return bool(run["status"]["observedGeneration"] == run["metadata"]["generation"])


def test_an_entry_is_a_set_a_service_and_a_budget_and_the_status_tells_of_it(ns: Kubectl) -> None:
    for kind in ("service", "poddisruptionbudget"):
        wait_until(kind, lambda k=kind: ns.get(k, ROLLOUT) is not None)
    assert ns.get("deployment", ROLLOUT) is None
    wait_until("it is told", lambda: condition(ns)["reason"] == "NotAllReady")
    wait_until("it counts", lambda: "0 of 2 are ready" in condition(ns)["message"])


def test_a_set_that_is_deleted_is_made_again_and_one_that_is_changed_is_put_right(
    ns: Kubectl,
) -> None:
    before = ns.get(KIND, ROLLOUT)
    assert before is not None
    ns("delete", KIND, ROLLOUT, "--wait=false")

    def again() -> bool:
        found = ns.get(KIND, ROLLOUT)
        return found is not None and found["metadata"]["uid"] != before["metadata"]["uid"]

    wait_until("it is there again", again)
    ns("scale", KIND, ROLLOUT, "--replicas=5")
    wait_until("what the spec says holds", lambda: replicas(ns) == 2)


def test_who_scales_a_set_decides_where_the_spec_says_nothing(ns: Kubectl) -> None:
    assert ns.apply(changed(manifest(), "spec.servers.0.replicas", ...)).returncode == 0
    wait_until("the operator has seen that", lambda: is_seen(ns))
    ns("scale", KIND, ROLLOUT, "--replicas=3")
    # Something else of the entry is applied after it.
    other = changed(manifest(), "spec.servers.0.replicas", ...)
    assert ns.apply(changed(other, "spec.servers.0.port", 9001)).returncode == 0

    def asked() -> tuple[int, int]:
        service, run = ns.get("service", ROLLOUT), ns.get("trainingrun", RUN)
        assert service is not None
        assert run is not None
        rollout = next(e for e in run["status"]["servers"] if e["name"] == "rollout")
        return service["spec"]["ports"][0]["port"], rollout["replicas"]

    wait_until("three are asked for", lambda: asked() == (9001, 3))
    assert ns.get("trainingrun", RUN)["status"]["attempt"] == 0  # type: ignore[index]


def test_an_entry_that_is_removed_takes_its_set(ns: Kubectl) -> None:
    assert ns.apply(changed(manifest(), "spec.servers.0", ...)).returncode == 0
    wait_until("no set", lambda: ns.get(KIND, ROLLOUT) is None)
    assert ns.get("deployment", JUDGE) is not None
