"""The tests' cluster, a kubectl for it, and namespaces that are deleted after a test."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.shell import Progress
from devcluster.tools import ensure_tools
from tests.cluster.api_reader import ApiReader
from tests.cluster.chart.helm import FIXTURES, Helm

ROOT = Path(__file__).resolve().parents[2]
BEGAN = datetime.now(UTC)
CRD_FILE = ROOT / "crds" / "trainsync.dev_trainingruns.yaml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the other tests made the API server log is looked at last."""
    items.sort(key=lambda item: item.path.name == "test_rights.py")


class Kubectl:
    """kubectl for one cluster, and optionally one namespace. Every call has a deadline.

    `get`, `list` and `patch` go without the program; see `ApiReader`.
    """

    def __init__(
        self,
        program: str,
        kubeconfig: str,
        namespace: str | None = None,
        reader: ApiReader | None = None,
    ) -> None:
        self._words = [program, "--kubeconfig", kubeconfig]
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        if namespace:
            self._words += ["--namespace", namespace]
        self._program = program
        self._reader = reader

    @property
    def reader(self) -> ApiReader:
        """Asks this cluster's API server; made when it is first used."""
        if self._reader is None:
            words = ("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
            self._reader = ApiReader(json.loads(self(*words)))
        return self._reader

    def within(self, namespace: str) -> "Kubectl":
        """This kubectl in a namespace."""
        return Kubectl(self._program, self.kubeconfig, namespace, self.reader)

    def run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command; its result may be a failure."""
        return subprocess.run(
            [*self._words, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, *words: str, stdin: str | None = None) -> str:
        """Run a command that must succeed; returns its output."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, obj: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
        """`kubectl apply` of an object; the result may be a failure."""
        return self.run("apply", "-f", "-", *words, stdin=json.dumps(obj))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None."""
        return self.reader.get(kind, self.namespace or "default", name)

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind."""
        return self.reader.list(kind, self.namespace or "default", selector)

    def patch(self, kind: str, name: str, change: dict[str, Any], part: str = "") -> None:
        """Merge ``change`` into an object, or its subresource ``part``."""
        self.reader.patch(kind, self.namespace or "default", name, change, part)


def wait_until(what: str, check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until ``check`` returns a true value, and return the value; ``check`` may fail
    before."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = check()
        # A new object lacks parts of its status.
        except (AssertionError, KeyError, StopIteration) as error:
            last = error
        else:
            if last:
                return last
        time.sleep(0.2)  # between two looks, each of which costs the API server a request
    raise AssertionError(f"not within {seconds:.0f} s: {what}; last: {last}")


def left_over(kubectl: Kubectl, run: str) -> list[str]:
    """Objects that still have a run's label: children, pods, and objects made by KubeRay."""
    kinds = (
        "rayjob,raycluster,deployment,pod,service,serviceaccount,role,rolebinding,"
        "persistentvolumeclaim,lease,poddisruptionbudget"
    )
    return kubectl("get", kinds, "-l", f"trainsync.dev/run={run}", "-o", "name").split()


def _devcluster(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "devcluster", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def kubeconfig() -> str:
    """KUBECONFIG of the caller, else of the development cluster, which is started if needed."""
    given = os.environ.get("KUBECONFIG")
    if given:
        return given
    if os.geteuid() != 0:
        pytest.skip("give a cluster with KUBECONFIG, or be root so that devcluster can make one")
    _devcluster("up")
    return _devcluster("kubeconfig").splitlines()[-1]


@pytest.fixture(scope="session")
def kubectl(kubeconfig: str) -> Kubectl:
    """kubectl for the cluster, without a namespace."""
    program = shutil.which("kubectl")
    if program is None:
        program = str(Path(_devcluster("tools").splitlines()[-1]) / "kubectl")
    return Kubectl(program, kubeconfig)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """helm for no cluster."""
    return Helm(ensure_tools(Progress()).path("helm"))


@pytest.fixture(scope="session")
def crd(kubectl: Kubectl) -> None:
    """The CRD of this checkout, established."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD_FILE))
    kubectl(
        "wait", "--for=condition=Established", "--timeout=30s", "crd/trainingruns.trainsync.dev"
    )

    def served() -> bool:
        # A new CRD is Established a moment before its objects can be listed.
        return kubectl.run("get", "trainingruns", "--all-namespaces").returncode == 0

    wait_until("TrainingRuns are served", served)


@pytest.fixture(scope="module")
def operators_crds(kubectl: Kubectl) -> Iterator[None]:
    """The CRDs of the Prometheus Operator and the Grafana Operator, during a test."""
    made = []
    for file in sorted((FIXTURES / "crds").glob("*.yaml")):
        name = yaml.safe_load(file.read_text())["metadata"]["name"]
        if kubectl.get("crd", name) is None:
            kubectl("apply", "--server-side", "-f", str(file))
            made.append(name)
    try:
        for name in made:
            # A CRD is Established a moment before its kind is served.
            wait_until(f"{name} is served", lambda n=name: kubectl.list(n) == [])
        yield
    finally:
        for name in made:
            kubectl("delete", "crd", name)


def _namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield kubectl.within(name)
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test."""
    yield from _namespace(kubectl)


@pytest.fixture(scope="module")
def module_namespace(kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of the module."""
    yield from _namespace(kubectl)


@contextmanager
def served_without_controller(kubectl: Kubectl, file: Path) -> Iterator[None]:
    """The CRD of ``file``, and nothing that looks after its objects; one that is there stays."""
    crd = yaml.safe_load(file.read_text())
    name = crd["metadata"]["name"]
    made = kubectl.get("crd", name) is None
    if made:
        kubectl("apply", "--server-side", "-f", str(file))
    # It is Established a moment before its kind is served.
    asked = ("get", name, "--all-namespaces")
    wait_until("the kind is served", lambda: kubectl.run(*asked).returncode == 0)
    yield
    if made:
        kubectl("delete", "crd", name)
