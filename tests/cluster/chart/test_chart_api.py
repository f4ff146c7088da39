"""The chart against a real API server: valid objects, and refused installs.

No operator is started: the releases here have no replicas.
"""

import json
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from devcluster.shell import Progress
from devcluster.tools import ensure_tools
from tests.cluster.chart.helm import CHART, EVERYTHING, KUBE_VERSION, Helm, Object
from tests.cluster.conftest import CRD_FILE, Kubectl, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

CRD = "trainingruns.trainsync.dev"
# A separate idle operator, without the CRD.
IDLE = ("--set=replicas=0", "--set=crds.enabled=false")
DRY = (*IDLE, "--dry-run=server")


@pytest.fixture(scope="session")
def cluster_helm(kubeconfig: str) -> Helm:
    return Helm(ensure_tools(Progress()).path("helm"), kubeconfig)


@pytest.fixture
def here(kubectl: Kubectl) -> Iterator[str]:
    """A namespace for a release."""
    yield from _namespace(kubectl)


@pytest.fixture
def runs(kubectl: Kubectl) -> Iterator[str]:
    """A namespace for runs."""
    yield from _namespace(kubectl)


def _namespace(kubectl: Kubectl) -> Iterator[str]:
    name = f"chart-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.usefixtures("operators_crds")
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("serviceMonitor.enabled=true", "podMonitor.enabled=true", "prometheusRule.enabled=true"),
        ("dashboards.enabled=true",),
        ("dashboards.enabled=true", "dashboards.kind=GrafanaDashboard"),
        None,
    ],
    ids=["defaults", "monitoring", "config maps", "grafana dashboards", "everything"],
)
def test_the_api_server_accepts_what_the_chart_makes(
    settings: tuple[str, ...] | None,
    kubectl: Kubectl,
    cluster_helm: Helm,
    here: str,
    tmp_path: Path,
) -> None:
    words = ["--values", str(EVERYTHING), "--set", f"dashboards.namespace={here}"]
    if settings is not None:
        words = [f"--set={setting}" for setting in settings]
    # The pod of `helm test` needs its ServiceAccount, also in a dry run.
    words += [f"--kube-version={KUBE_VERSION}", "--set=serviceAccount.name=default"]
    file = tmp_path / "made.yaml"
    file.write_text(cluster_helm("template", "dry", CHART, "--namespace", here, *words))
    done = kubectl.run("apply", "--dry-run=server", "--validate=strict", "-f", str(file))
    assert done.returncode == 0, done.stderr


def test_a_crd_from_an_older_version_is_taken_over_and_upgraded(
    kubectl: Kubectl, cluster_helm: Helm, here: str, crd: None
) -> None:
    older = yaml.safe_load(CRD_FILE.read_text())
    (version,) = older["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "ttlSecondsAfterFinished"
    ]
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(older))
    # A CRD made by `kubectl apply`: no release owns it.
    for kind, keys in (
        ("annotate", ("meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-")),
        ("label", ("app.kubernetes.io/managed-by-",)),
    ):
        kubectl(kind, "crd", CRD, *keys)
    try:
        words = ("install", "trainsync", CHART, "--namespace", here, "--set=replicas=0")
        words += (f"--set=watchNamespaces={{{here}}}",)
        refused = cluster_helm.run(*words)
        assert refused.returncode != 0
        assert f'CustomResourceDefinition "{CRD}"' in refused.stderr
        assert "cannot be imported into the current release" in refused.stderr

        cluster_helm(*words, "--take-ownership")
        now = kubectl.get("crd", CRD)
        assert now is not None
        spec = now["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        assert "ttlSecondsAfterFinished" in spec["properties"]
        assert now["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == here
        _check_rights_of_users(kubectl, here)
    finally:
        cluster_helm.run("uninstall", "trainsync", "--namespace", here)
        kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))


def _check_rights_of_users(kubectl: Kubectl, namespace: str) -> None:
    """The cluster's own roles edit and view hold the rights on runs that the chart adds."""

    def may(user: str, verb: str, *more: str) -> bool:
        words = ("auth", "can-i", verb, CRD, f"--as={user}", "-n", namespace)
        asked = kubectl.run(*words, *more)
        return asked.returncode == 0

    for user, role in (("writer", "edit"), ("reader", "view")):
        kubectl(
            "create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}",
            "-n", namespace,
        )  # fmt: skip
        # The controller manager adds the rules to the cluster's roles a moment later.
        wait_until(f"{user}s read runs", partial(may, user, "list"))
    wait_until("writers make runs", partial(may, "writer", "create"))
    assert may("writer", "delete")
    assert may("writer", "patch", "--subresource=scale")
    assert not may("writer", "patch", "--subresource=status")
    assert not may("reader", "create")
    assert not may("reader", "delete")


def refusal(helm: Helm, namespace: str, *words: str) -> str:
    """The error of `helm install` for a second release."""
    done = helm.run("install", "second", CHART, "--namespace", namespace, *DRY, *words)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_two_releases_serve_namespaces_of_their_own(
    cluster_helm: Helm, kubectl: Kubectl, here: str, runs: str, namespace: Kubectl
) -> None:
    cluster_helm(
        "install", "first", CHART, "--namespace", here, *IDLE, f"--set=watchNamespaces={{{runs}}}"
    )
    other = str(namespace.namespace)
    # own namespace and own runs: accepted
    cluster_helm(
        "install", "second", CHART, "--namespace", other, *DRY,
        f"--set=watchNamespaces={{{other}}}",
    )  # fmt: skip
    first = f"release first of namespace {here}"
    # the same runs
    said = refusal(cluster_helm, other, f"--set=watchNamespaces={{{other},{runs}}}")
    assert f"{first} runs the TrainingRuns of namespace {runs} already" in said
    # all runs, which include the same ones
    assert "runs the TrainingRuns of namespace" in refusal(cluster_helm, other)
    # the same Lease
    said = refusal(cluster_helm, here, f"--set=watchNamespaces={{{other}}}")
    assert f"{first} is in namespace {here} already" in said
    # the refusals do not affect the first release
    cluster_helm(
        "upgrade", "first", CHART, "--namespace", here, *IDLE, f"--set=watchNamespaces={{{runs}}}"
    )
    cluster_helm("uninstall", "first", "--namespace", here)


def test_an_operator_of_the_whole_cluster_is_alone(
    cluster_helm: Helm, kubectl: Kubectl, here: str
) -> None:
    name = f"trainsync-operator-{here}"
    labels = {"app.kubernetes.io/name": "trainsync-operator", "app.kubernetes.io/instance": name}
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name, "labels": labels},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
    }
    assert kubectl.apply(binding).returncode == 0
    try:
        words = ("install", "second", CHART, "--namespace", here, "--dry-run=server")
        done = cluster_helm.run(*words, f"--set=watchNamespaces={{{here}}}")
        assert done.returncode != 0
        assert f"release {name} runs the TrainingRuns of all namespaces" in done.stderr
    finally:
        kubectl("delete", "clusterrolebinding", name)


def test_notes_say_what_to_do_next(cluster_helm: Helm, here: str) -> None:
    words = ("install", "x", CHART, "--namespace", here, "--dry-run=server", "--take-ownership")
    words += (f"--set=watchNamespaces={{{here}}}",)
    notes = cluster_helm(*words).partition("NOTES:")[2]
    assert f"helm test -n {here} x" in notes
    assert "serviceMonitor.enabled=true" in notes
    assert "KubeRay is not in this cluster" not in notes
    risky = cluster_helm(*words, "--set=crds.keep=false").partition("NOTES:")[2]
    assert "WARNING: crds.keep is false" in risky
