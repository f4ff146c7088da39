"""KubeRay's own CRD takes each field of rayClusterOverrides from the RayCluster that is built."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from trainsync.api.base import Model
from trainsync.api.ray import RayClusterOverrides
from trainsync_operator.builders import raycluster
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.reconcile.run import Run, parse

from tests.cluster.conftest import Kubectl
from tests.cluster.manifests import autoscaled, full

pytestmark = pytest.mark.cluster

MANIFESTS = [full, autoscaled]


def run_of(manifest: dict[str, Any], namespace: str) -> Run:
    """The run as if the API server had made it."""
    made = {
        "namespace": namespace,
        "uid": "0",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return parse({**manifest, "metadata": {**manifest["metadata"], **made}})


def overrides(manifest: dict[str, Any]) -> RayClusterOverrides:
    found = run_of(manifest, "any").spec.clusters[0].ray_cluster_overrides
    assert found is not None
    return found


def unset(found: list[Any], where: str = "rayClusterOverrides") -> set[str]:
    """Fields of models that none of them sets."""
    given = [one for one in found if one]
    if not given:
        return {where}
    if not isinstance(given[0], Model):
        return set()
    names = type(given[0]).model_fields
    return set().union(*(unset([getattr(m, n) for m in given], f"{where}.{n}") for n in names))


def test_some_manifest_sets_each_override() -> None:
    assert unset([overrides(make()) for make in MANIFESTS]) == set()


@pytest.mark.parametrize("make", MANIFESTS)
def test_kuberay_takes_each_override(
    make: Callable[[], dict[str, Any]], module_namespace: Kubectl
) -> None:
    assert module_namespace.namespace is not None
    run = run_of(make(), module_namespace.namespace)
    (cluster,) = run.spec.clusters
    built = raycluster.build(Target(run, 0, 0, MonitorSettings("monitor:1")), cluster)
    # kubectl's validation refuses a field that the CRD does not know.
    done = module_namespace.apply(built, "--dry-run=server", "-o", "json")
    if "a kueue managed job can use autoscaling only" in done.stderr:
        pytest.skip("Kueue is in this cluster, which refuses Ray's autoscaler in any namespace")
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout)["spec"]
    given = make()["spec"]["clusters"][0]["rayClusterOverrides"]
    head = given.pop("headServiceType", None)
    assert {name: kept[name] for name in given} == given
    assert kept["headGroupSpec"].get("serviceType") == head
