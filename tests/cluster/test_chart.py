"""The chart with the real helm, on the real API server."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.errors import DemoError
from demo.kubectl import wait_for
from demo.platform import CHART, Images, Platform, own_cluster, prepare
from devcluster.shell import Progress
from devcluster.tools import ensure_tools

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

RELEASE = "trainsync-operator-chart"
WATCHED = "trainsync-chart-runs"
CRD = "trainingruns.trainsync.dev"
KUBE_VERSION = "1.34.0"  # what `helm template` without a cluster takes for the server's


@pytest.fixture(scope="module")
def helm() -> Path:
    return ensure_tools(Progress()).path("helm")


def render(helm: Path, *settings: str) -> list[dict[str, Any]]:
    words = [helm, "template", "x", CHART, f"--kube-version={KUBE_VERSION}", "--namespace=here"]
    sets = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run([*words, *sets], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise DemoError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def only(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def test_helm_finds_nothing_to_complain_about(helm: Path) -> None:
    done = subprocess.run(
        [helm, "lint", "--strict", CHART], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_by_default_the_operator_serves_the_whole_cluster(helm: Path) -> None:
    documents = render(helm)
    only(documents, "ClusterRole")
    binding = only(documents, "ClusterRoleBinding")
    account = only(documents, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": "here"}
    ]
    assert account["namespace"] == "here"
    assert not any("--namespace" in flag for flag in container(documents)["args"])


def test_with_namespaces_there_is_no_cluster_wide_right(helm: Path) -> None:
    documents = render(helm, "watchNamespaces={a,b}")
    kinds = [document["kind"] for document in documents]
    assert "ClusterRole" not in kinds
    assert "ClusterRoleBinding" not in kinds
    roles = [document for document in documents if document["kind"] == "Role"]
    assert sorted(role["metadata"]["namespace"] for role in roles) == ["a", "b", "here"]
    assert {"--namespace=a", "--namespace=b"} <= set(container(documents)["args"])


def test_the_operator_runs_with_nothing_it_does_not_need(helm: Path) -> None:
    documents = render(helm)
    pod = only(documents, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(documents)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_no_role_reaches_secrets_or_other_pods(helm: Path) -> None:
    for document in render(helm):
        for rule in document.get("rules") or []:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "pods/exec", "pods/attach"} & set(rule["resources"])


@pytest.mark.parametrize(
    ("setting", "kinds"), [("crds.enabled=false", 0), ("crds.enabled=true", 1)]
)
def test_the_crd_comes_when_it_is_wanted(helm: Path, setting: str, kinds: int) -> None:
    found = [d for d in render(helm, setting) if d["kind"] == "CustomResourceDefinition"]
    assert len(found) == kinds


@pytest.mark.parametrize(("keep", "policy"), [("true", "keep"), ("false", None)])
def test_the_crd_is_kept_when_it_is_wanted(helm: Path, keep: str, policy: str | None) -> None:
    crd = only(render(helm, f"crds.keep={keep}"), "CustomResourceDefinition")
    assert crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy


def test_a_value_that_does_nothing_is_refused(helm: Path) -> None:
    with pytest.raises(DemoError, match="replica"):
        render(helm, "replica=2")


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    containers: list[dict[str, Any]] = only(documents, "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    (found,) = containers
    return found


@pytest.fixture
def platform() -> Iterator[Platform]:
    kubeconfig = os.environ.get("KUBECONFIG")
    images = None
    if own_cluster(kubeconfig):
        variables = ("OPERATOR_IMAGE", "MONITOR_IMAGE", "RAY_IMAGE")
        if not all(name in os.environ for name in variables):
            pytest.skip(f"KUBECONFIG is a cluster of yours: name its images in {variables}")
        images = Images(*(os.environ[name] for name in variables))
    made = prepare(kubeconfig, images, Progress())
    yield made
    for namespace in (RELEASE, WATCHED):
        made.kubectl.run("delete", "namespace", namespace, "--ignore-not-found", timeout=120)


def test_install_upgrade_and_uninstall(platform: Platform) -> None:
    kubectl = platform.kubectl
    platform.install_chart(RELEASE, [WATCHED])
    pods = kubectl.objects("pods", RELEASE, f"app.kubernetes.io/instance={RELEASE}")
    assert [pod["status"]["phase"] for pod in pods] == ["Running"]
    lease = kubectl.get("lease", "trainsync-operator", RELEASE)
    assert lease is not None, "the operator did not take its Lease"

    platform.install_chart(RELEASE, [WATCHED], "replicas=2", "logLevel=debug")
    deployment = kubectl.get("deployment", RELEASE, RELEASE)
    assert deployment is not None
    assert deployment["status"]["readyReplicas"] == 2
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--log-level=debug" in operator["args"]

    platform.run_helm("uninstall", RELEASE, "--namespace", RELEASE, "--wait")
    left = "deployments,services,roles,rolebindings,pods"
    selector = f"app.kubernetes.io/instance={RELEASE}"
    wait_for(lambda: kubectl.objects(left, RELEASE, selector) == [], what="pods to go", seconds=60)
    assert kubectl.objects("roles,rolebindings", WATCHED, selector) == []
    assert kubectl.get("crd", CRD, RELEASE) is not None, "the CRD went with the release"
