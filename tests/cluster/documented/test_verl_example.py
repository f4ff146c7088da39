"""The TrainingRuns for verl on GPUs, against the real API server and the operator."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.operator.operator_process import OperatorProcess, running_operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("crd")]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "verl_grpo"
NO_IMAGE = "localhost/trainsync/none:1"
MANIFESTS = sorted(EXAMPLE.glob("*.yaml"))


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, NO_IMAGE) as process:
        yield process


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_api_server_takes_the_manifest_as_it_is(path: Path, namespace: Kubectl) -> None:
    namespace("apply", "--dry-run=server", "-f", str(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_operator_renders_it_into_a_ray_cluster_with_its_gpus(
    path: Path, module_namespace: Kubectl, operator: OperatorProcess
) -> None:
    run: dict[str, Any] = copy.deepcopy(yaml.safe_load(path.read_text()))
    (cluster,) = run["spec"]["clusters"]
    cluster["image"] = NO_IMAGE
    done = module_namespace.apply(run)
    assert done.returncode == 0, done.stderr
    name = run["metadata"]["name"]
    found = wait_until(
        "the RayCluster", lambda: module_namespace.get("raycluster", f"{name}-main-0"), 60
    )
    groups = {group["groupName"]: group for group in found["spec"]["workerGroupSpecs"]}
    assert set(groups) == {"trainer", "explorer"}
    for group in groups.values():
        assert group["replicas"] == 2
        pod = group["template"]["spec"]
        ray = pod["containers"][0]
        assert ray["resources"]["limits"]["nvidia.com/gpu"] in (8, "8")
        mounts = {mount["mountPath"] for mount in ray["volumeMounts"]}
        assert {"/data", "/dev/shm", "/trainsync/checkpoints"} <= mounts
        directory = {entry["name"]: entry.get("value") for entry in ray["env"]}
        assert directory["TRAINSYNC_CHECKPOINT_DIR"] == f"/trainsync/checkpoints/team/{name}"
    module_namespace("delete", "trainingrun", name, "--wait=false")
