"""The chart's NetworkPolicies and the documented one, enforced, with real pods and runs.

Not part of `make test`: `make test-policies` builds a policy controller first. Every connection
that must be refused is opened before there is a policy: else the cluster enforces none.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import yaml
from trainsync.api import names
from trainsync_operator.builders.servers.pod import AGENT

from demo.errors import KubectlError
from demo.kubectl import Object, wait_for
from demo.platform import Platform
from tests.cluster.fake_server import fake_server
from tests.e2e import harness
from tests.e2e.harness import NAMESPACE, RELEASE
from tests.e2e.two_clusters_workload import STEPS
from tests.policies.places import Place, address, place
from tests.unit.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RUN: Final = "policed"
OTHERS: Final = "trainsync-policies-others"
SCRAPERS: Final = "trainsync-policies-scrapers"
MONITOR: Final = f"{names.monitor_name(RUN)}.{NAMESPACE}.svc"
OPERATOR: Final = f"{RELEASE}-metrics.{RELEASE}.svc"
SERVER: Final = f"{names.server_name(RUN, 'real')}.{NAMESPACE}.svc"
HEAD: Final = f"{RUN}-main-0-head-svc.{NAMESPACE}.svc"
LISTENER: Final = "listener"
# Of the monitor and of the operator, the server of `fake_server`, and Ray's dashboard.
PORT, SERVER_PORT, DASHBOARD_PORT = names.MONITOR_PORT, 8000, 8265
API_PORT, OTHER_PORT = 6443, 9999
INTERVAL: Final = 4
_APPLIED_SECONDS: Final = 60

OPEN: Final = [
    ("trainer", MONITOR, PORT),
    ("head", MONITOR, PORT),
    ("agent", MONITOR, PORT),
    ("another run", MONITOR, PORT),
    ("scraper", MONITOR, PORT),
    ("scraper", OPERATOR, PORT),
    ("monitor", LISTENER, API_PORT),
    ("operator", LISTENER, API_PORT),
    ("trainer", SERVER, SERVER_PORT),
    ("trainer", HEAD, DASHBOARD_PORT),
    ("agent", HEAD, DASHBOARD_PORT),
]
SHUT: Final = [
    ("unlabelled", MONITOR, PORT),
    ("outsider", MONITOR, PORT),
    ("listener", MONITOR, PORT),
    ("operator", MONITOR, PORT),
    ("trainer", OPERATOR, PORT),
    ("unlabelled", OPERATOR, PORT),
    ("monitor", LISTENER, OTHER_PORT),
    ("operator", LISTENER, OTHER_PORT),
    ("monitor", OPERATOR, PORT),
    ("unlabelled", SERVER, SERVER_PORT),
    ("outsider", SERVER, SERVER_PORT),
    ("another run", SERVER, SERVER_PORT),
    ("unlabelled", HEAD, DASHBOARD_PORT),
    ("another run", HEAD, DASHBOARD_PORT),
]


@dataclass(frozen=True)
class Scene:
    """A run that trains without end, and places from which to connect."""

    platform: Platform
    run: harness.Run
    places: dict[str, Place]
    was_open: dict[tuple[str, str, int], bool]
    """What was open before there was a policy."""

    def reaches(self, source: str, target: str, port: int) -> bool:
        """Whether a connection opens now."""
        host = address(self.places[target]) if target == LISTENER else target
        return self.places[source].reaches(host, port)


@pytest.fixture(scope="module")
def scene(platform: Platform) -> Iterator[Scene]:
    """The chart's policies and the documented one, applied after all connections were tried."""
    command = "python /opt/trainsync-e2e/workload.py --steps 1000000 --trainers 1"
    manifest = platform.fit(harness.training_run(RUN, command, trainers=1, interval=INTERVAL))
    manifest["spec"]["sync"] = {"method": "checkpoint"}
    manifest["spec"]["servers"] = [fake_server(platform, "real")]
    platform.kubectl.apply(harness.workload_map(), manifest, namespace=NAMESPACE)
    run = harness.Run(platform, RUN)
    try:
        run.wait(lambda now, _: (now.committed or 0) > 0, "a step is committed", 300)
        wait_for(lambda: reporting(run), what="the agent to report", seconds=120)
        places = make_places(platform)
        made = Scene(platform, run, places, {})
        for pair in (*OPEN, *SHUT):
            made.was_open[pair] = made.reaches(*pair)
        platform.kubectl.apply(documented_policy(RUN), namespace=NAMESPACE)
        install(platform)
        yield made
    finally:
        run.delete()
        platform.install_chart(RELEASE, [NAMESPACE])
        platform.kubectl.run("-n", NAMESPACE, "delete", "networkpolicies,pods", "-l", "probe=yes")
        for namespace in (OTHERS, SCRAPERS):
            words = ("delete", "namespace", namespace, "--ignore-not-found")
            platform.kubectl.run(*words, timeout=120)


def make_places(platform: Platform) -> dict[str, Place]:
    """Pods of the run, of the chart, and of the test."""
    probe = {"probe": "yes"}

    def found(namespace: str, selector: str, container: str) -> Place:
        (pod,) = platform.kubectl.objects("pods", namespace, selector)
        return Place(platform.kubectl, namespace, pod["metadata"]["name"], container)

    def of_run(label: str, container: str) -> Place:
        return found(NAMESPACE, f"{names.LABEL_RUN}={RUN},{label}", container)

    another = {names.LABEL_RUN: "another", **probe}
    monitor = f"deployment/{names.monitor_name(RUN)}"
    return {
        "trainer": of_run(f"{names.LABEL_ROLE}=Trainer", "ray"),
        "head": of_run(f"{names.LABEL_ROLE}=Head", "ray"),
        "agent": of_run(f"{names.LABEL_COMPONENT}=server", AGENT),
        "monitor": Place(platform.kubectl, NAMESPACE, monitor),
        # Not by its pod: `install` makes another one.
        "operator": Place(platform.kubectl, RELEASE, f"deployment/{RELEASE}", "operator"),
        "another run": place(platform, NAMESPACE, "another", another),
        "unlabelled": place(platform, NAMESPACE, "unlabelled", probe),
        # Of the right label in the wrong namespace.
        "outsider": place(platform, OTHERS, "outsider", {names.LABEL_RUN: RUN}),
        LISTENER: place(platform, OTHERS, LISTENER, {}, API_PORT, OTHER_PORT),
        "scraper": place(platform, SCRAPERS, "scraper", {}),
    }


def install(platform: Platform, **more: Any) -> None:
    """The chart with both policies; ``more`` are values of networkPolicy.monitors."""
    scrapers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": SCRAPERS}}}
    monitors = {"enabled": True, "from": [scrapers], **more}
    values = {"enabled": True, "metricsFrom": [scrapers], "monitors": monitors}
    platform.install_chart(RELEASE, [NAMESPACE], *settings("networkPolicy", values))


def settings(path: str, value: Any) -> list[str]:
    """A value as arguments of helm's ``--set``."""
    if isinstance(value, dict):
        pairs = [(f"{path}.{key.replace('.', chr(92) + '.')}", each) for key, each in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    else:
        return [f"{path}={json.dumps(value).strip(chr(34))}"]
    return [setting for key, each in pairs for setting in settings(key, each)]


def documented_policy(run: str) -> Object:
    """The policy for pods of a run on the page of the security model."""
    texts = [block.text for block in blocks(ROOT / "docs" / "security.md")]
    (text,) = (text for text in texts if "kind: NetworkPolicy" in text)
    policy: Object = yaml.safe_load(text.replace("my-run", run))
    policy["metadata"]["labels"] = {"probe": "yes"}
    return policy


def reporting(run: harness.Run) -> set[str]:
    """Pods whose agent the monitor has heard within the last minute."""
    found = run.kubectl.get(names.PLURAL, run.name, NAMESPACE) or {}
    servers = found["status"].get("weights", {}).get("servers") or []
    return {server["name"] for server in servers}


def trains_on(run: harness.Run) -> None:
    """Wait for two more commits of the first attempt."""
    now = run.wait(lambda *_: True, "its status", 30)
    wanted = (now.committed or 0) + 2 * INTERVAL
    end = run.wait(lambda now, _: (now.committed or 0) >= wanted, f"step {wanted}", 180)
    assert (end.attempt, end.restarts) == (0, 0)


@pytest.mark.parametrize(("source", "target", "port"), SHUT)
def test_what_no_policy_allows_is_refused_and_was_open_before(
    source: str, target: str, port: int, scene: Scene
) -> None:
    assert scene.was_open[source, target, port], "it was shut without a policy: nothing is shown"
    wait_for(
        lambda: not scene.reaches(source, target, port),
        what=f"{source} to be refused by {target}",
        seconds=_APPLIED_SECONDS,
    )


@pytest.mark.parametrize(("source", "target", "port"), OPEN)
def test_what_the_policies_allow_gets_through(
    source: str, target: str, port: int, scene: Scene
) -> None:
    assert scene.was_open[source, target, port]
    wait_for(
        lambda: scene.reaches(source, target, port),
        what=f"{source} to reach {target}",
        seconds=_APPLIED_SECONDS,
    )


def test_a_named_peer_scrapes_operator_and_monitor(scene: Scene) -> None:
    scraper = scene.places["scraper"]
    assert "trainsync_operator_leader" in scraper.reads(f"http://{OPERATOR}:{PORT}/metrics")
    assert "trainsync_run_" in scraper.reads(f"http://{MONITOR}:{PORT}/metrics")


def test_helm_test_passes_with_the_policies(scene: Scene) -> None:
    scene.platform.run_helm("test", RELEASE, "--namespace", RELEASE)


def test_a_run_that_trains_when_the_policies_come_trains_on(scene: Scene) -> None:
    trains_on(scene.run)


def test_a_monitor_and_an_agent_that_start_anew_find_each_other(scene: Scene) -> None:
    before = reporting(scene.run)
    selector = f"{names.LABEL_RUN}={RUN},{names.LABEL_COMPONENT} in (monitor,server)"
    scene.platform.kubectl.run("-n", NAMESPACE, "delete", "pods", "-l", selector, timeout=120)
    wait_for(lambda: reporting(scene.run) - before, what="the new agent to report", seconds=180)
    trains_on(scene.run)


def test_a_run_with_explorers_begins_and_ends_under_the_policies(scene: Scene) -> None:
    name = "begins"
    scene.platform.kubectl.apply(documented_policy(name), namespace=NAMESPACE)
    run = harness.start(
        scene.platform, name, "--steps 8 --trainers 2 --explorers", trainers=2, explorers=1
    )
    try:
        end = run.wait_complete(400)
        assert (end.restarts, end.step, end.committed) == (0, 8, 8)
        assert run.committed() == [4, 8]
        run.verify()
    finally:
        run.delete()


def test_explorers_of_another_cluster_call_through_the_monitor(scene: Scene) -> None:
    name = "apart"
    scene.platform.kubectl.apply(documented_policy(name), namespace=NAMESPACE)
    run = harness.start_apart(scene.platform, name, "nccl")
    try:
        end = run.wait_complete(400)
        assert (end.restarts, end.step, end.version) == (0, STEPS, STEPS)
    finally:
        run.delete()


def test_what_the_values_name_for_monitors_gets_through(scene: Scene) -> None:
    kubectl = scene.platform.kubectl
    service = f"http:{names.monitor_name(RUN)}:http"
    proxied = f"/api/v1/namespaces/{NAMESPACE}/services/{service}/proxy/healthz"

    def through_api_server() -> bool:
        try:
            kubectl.run("get", "--raw", proxied)
        except KubectlError as error:
            assert "refused" in str(error) or "i/o timeout" in str(error), error
            return False
        return True

    assert not through_api_server()
    servers = kubectl.get("endpoints", "kubernetes", "default")
    assert servers is not None
    addresses = [each["ip"] for subset in servers["subsets"] for each in subset["addresses"]]
    peers = [{"ipBlock": {"cidr": f"{each}/32"}} for each in addresses]
    listener = {"ipBlock": {"cidr": f"{address(scene.places[LISTENER])}/32"}}
    egress = {"to": [listener], "ports": [{"port": OTHER_PORT, "protocol": "TCP"}]}
    install(scene.platform, **{"from": peers, "egress": [egress]})
    wait_for(through_api_server, what="the API server to reach it", seconds=_APPLIED_SECONDS)
    wait_for(
        lambda: scene.reaches("monitor", LISTENER, OTHER_PORT),
        what="the monitor to reach what egress names",
        seconds=_APPLIED_SECONDS,
    )
    wait_for(
        lambda: not scene.reaches("scraper", MONITOR, PORT),
        what="a peer that is named no more to be refused",
        seconds=_APPLIED_SECONDS,
    )
