"""Runs the documentation's commands for a cluster.

The blocks marked `cluster` run in the order of a user: install, apply a run, inspect the run,
upgrade, uninstall. The run's monitor is real; the Ray pods never start, since their image does
not exist.
"""

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from demo.platform import Platform
from tests.cluster.conftest import ROOT, Kubectl, left_over, wait_until
from tests.cluster.documented.reader import Reader, environment
from tests.cluster.manifests import changed, minimal
from tests.cluster.prepared import prepared
from tests.ports import port_of, reserved_port
from tests.unit.docs.elsewhere import ELSEWHERE
from tests.unit.docs.pages import all_blocks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(540)]

RUN = "my-run"  # the name in docs/trainingrun.md
LOOKS = (
    "docs/operate.md",
    "docs/runbooks/index.md",
    "docs/trainingrun.md",
    "docs/cli.md",
    "docs/checkpoints.md",
    "README.md",
)
MARKED = [block for block in all_blocks("bash", "console") if block.directive == "cluster"]


@pytest.fixture(scope="module")
def platform() -> Platform:
    return prepared()


@pytest.fixture
def release(kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in the namespace that the pages call `trainsync`, made by helm."""
    name = f"docs-{uuid.uuid4().hex[:8]}"
    yield kubectl.within(name)
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture
def reader(
    platform: Platform, release: Kubectl, namespace: Kubectl, tmp_path: Path
) -> Iterator[Reader]:
    """A reader in a folder with the repository's charts and `my-run.yaml`."""
    for name in ("charts", "crds", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / f"{RUN}.yaml").write_text(json.dumps(run()))
    config = tmp_path / "kubeconfig"
    config.write_text(namespace("config", "view", "--raw", "--flatten"))
    config.chmod(0o600)
    with closing(reserved_port()) as port:
        tools = (Path(platform.kubectl.program).parent, platform.helm.parent)
        found = Reader(
            tmp_path,
            environment(config, *tools),
            words(platform, str(release.namespace), str(namespace.namespace), port_of(port)),
            frozenset(ELSEWHERE),
        )
        where = f"--namespace={namespace.namespace}"
        found.type(f"kubectl config set-context --current {where}")
        yield found


def run() -> dict[str, object]:
    """The run of the pages."""
    made = changed(minimal(RUN), "spec.clusters.0.image", "localhost/trainsync/none:1")
    storage = {"volumeClaimTemplate": {"size": "1Mi", "retentionPolicy": "Delete"}}
    made["spec"]["checkpoint"] = {"storage": storage, "path": f"team/{RUN}"}
    return made


def words(platform: Platform, release: str, runs: str, port: int) -> dict[str, str]:
    """Replacements for the pages' placeholders, and names that do not collide on a shared
    cluster."""
    found = {
        r"--create-namespace": "--create-namespace --take-ownership "
        f"--set watchNamespaces={{{runs}}}",
        r"(--namespace|-n) trainsync\b": f"--namespace {release}",
        r"\bNAMESPACE\b": runs,
        r"\bNAME\b": RUN,
        r"\bREVISION\b": "1",
        r"(svc/\S+) 8080\b": rf"\1 {port}:8080",
        r"localhost:8080\b": f"localhost:{port}",
    }
    for part, image in (
        ("operator", platform.images.operator),
        ("monitor", platform.images.monitor),
    ):
        repository, _, tag = image.rpartition(":")
        found[rf"REGISTRY/trainsync/{part},(\w+)\.tag=TAG"] = rf"{repository},\1.tag={tag}"
    return found


@pytest.mark.usefixtures("operators_crds")
def test_the_pages_can_be_followed_from_install_to_uninstall(
    reader: Reader, release: Kubectl, namespace: Kubectl
) -> None:
    said = follow(reader, "docs/install.md")
    assert "Phase:          Succeeded" in said
    made = release.list("servicemonitors,podmonitors,prometheusrules")
    assert {o["kind"] for o in made} == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    reader.type(f"kubectl apply -f {RUN}.yaml")

    def ready() -> bool:
        found = namespace.get("deployment", f"{RUN}-monitor") or {}
        return bool((found.get("status") or {}).get("readyReplicas"))

    wait_until("the monitor is ready", ready, 180)
    for page in LOOKS:
        said = follow(reader, page)
        known = (RUN, "trainsync_", "nothing is committed")
        assert any(word in said for word in known), f"{page}: {said}"
    assert "uninstalled" in follow(reader, "docs/upgrade.md")
    assert namespace.get("trainingrun", RUN) is not None, "the run went with the release"
    namespace("delete", "trainingrun", RUN, "--wait=false")
    wait_until("nothing is left of the run", lambda: not left_over(namespace, RUN), 90)


def follow(reader: Reader, page: str) -> str:
    """Run the page's marked blocks; returns the output."""
    found = [block for block in MARKED if block.where.rpartition(":")[0] == page]
    return "\n".join(reader.follow(block) for block in found)


def test_every_page_with_commands_for_a_cluster_is_followed() -> None:
    assert {block.where.rpartition(":")[0] for block in MARKED} == {
        "docs/install.md",
        *LOOKS,
        "docs/upgrade.md",
    }
