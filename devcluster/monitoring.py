"""A Prometheus run by the Prometheus Operator, to test the chart's monitors and rules.

Not part of a cluster: `python3 -m devcluster monitoring` adds it to a running cluster.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from devcluster.addons import is_available
from devcluster.controlplane.kubeapi import ApiError, KubeApi
from devcluster.images.imageload import load_images
from devcluster.images.images import (
    CONFIG_RELOADER_IMAGE,
    MONITORING_RECIPES,
    PROMETHEUS_IMAGE,
    PROMETHEUS_OPERATOR_IMAGE,
    pack_images,
)
from devcluster.registry import Record
from devcluster.shell import Progress, run, wait_until, write_json
from devcluster.tools import PROMETHEUS_CONFIG, Tools, ensure_monitoring_tools, ensure_tools

NAMESPACE = "monitoring"
PROMETHEUS = "devcluster"
SELECTED = {"release": "devcluster"}
"""Label of the monitors and rules that this Prometheus selects."""

_VERSION = "v3.7.3"  # of the module v0.307.3
_APPLY_SECONDS = 120
_READY_SECONDS = 180


def start_monitoring(record: Record, progress: Progress) -> None:
    """Apply operator and Prometheus and wait until both are available; repeatable.

    Raises DevclusterError.
    """
    cluster = record.cluster
    tools = ensure_monitoring_tools(progress)
    archives = pack_images(tools, cluster.directory / "images", MONITORING_RECIPES)
    nodes = [cluster.node(number) for number in range(1, record.nodes + 1)]
    load_images(nodes, archives, progress)
    kubectl = str(ensure_tools(progress).path("kubectl"))
    apply = [kubectl, f"--kubeconfig={cluster.kubeconfig}", "apply", "--server-side"]
    apply += ["--force-conflicts", "-f"]
    progress.say("applying the Prometheus Operator")
    rendered = run([kubectl, "kustomize", _overlay(tools, cluster.directory)], timeout=60)
    run([*apply, "-"], stdin=rendered, timeout=_APPLY_SECONDS)
    api = KubeApi(cluster)
    crd = "/apis/monitoring.coreos.com/v1/prometheuses"
    wait_until(lambda: _served(api, crd), what="the Prometheus CRD", seconds=30)
    manifest = cluster.directory / "prometheus.json"
    write_json(manifest, prometheus())
    run([*apply, str(manifest)], timeout=_APPLY_SECONDS)
    progress.say("waiting for Prometheus")
    wait_until(
        lambda: is_available(api, NAMESPACE, "prometheus-operator") and _works(api),
        what=f"Prometheus; see `kubectl -n {NAMESPACE} describe pods`",
        seconds=_READY_SECONDS,
    )
    progress.say(
        f"Prometheus is up: kubectl -n {NAMESPACE} port-forward svc/prometheus-operated 9090"
    )


def _served(api: KubeApi, path: str) -> bool:
    try:
        api.get(path)
    except ApiError as error:
        if error.status in (0, 404, 429):  # 429: the kind's storage is not ready
            return False
        raise
    return True


def _works(api: KubeApi) -> bool:
    path = f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/prometheuses/{PROMETHEUS}"
    conditions = api.get(path).get("status", {}).get("conditions", [])
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


def prometheus() -> dict[str, Any]:
    """The Prometheus object: short intervals, few resources, no persistence."""
    everywhere = {
        f"{kind}{what}": value
        for kind in ("serviceMonitor", "podMonitor", "rule")
        for what, value in (("Selector", {"matchLabels": SELECTED}), ("NamespaceSelector", {}))
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": PROMETHEUS, "namespace": NAMESPACE},
        "spec": {
            "replicas": 1,
            "image": PROMETHEUS_IMAGE,
            "version": _VERSION,
            "serviceAccountName": "prometheus",
            "scrapeInterval": "2s",
            "evaluationInterval": "2s",
            "retention": "6h",
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
            **everywhere,
        },
    }


def _overlay(tools: Tools, directory: Path) -> Path:
    """The operator's own manifests with our images, as a folder for kustomize."""
    top = directory / "monitoring"
    with tempfile.TemporaryDirectory(prefix=".monitoring-", dir=directory) as scratch:
        made = Path(scratch) / "made"
        # kustomize needs all files below one root, with relative paths.
        shutil.copytree(tools.path(PROMETHEUS_CONFIG).resolve(), made)
        files = [
            *sorted((made / "prometheus-operator-crd").glob("*.yaml")),
            *sorted((made / "rbac" / "prometheus-operator").glob("prometheus-operator-cluster*")),
            made / "rbac" / "prometheus-operator" / "prometheus-operator-deployment.yaml",
            made / "rbac" / "prometheus-operator" / "prometheus-operator-service-account.yaml",
            *sorted((made / "rbac" / "prometheus").glob("prometheus-*.yaml")),
        ]
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        (made / "namespace.json").write_text(json.dumps(namespace))
        resources = ["namespace.json", *(str(file.relative_to(made)) for file in files)]
        (made / "kustomization.yaml").write_text(json.dumps(_kustomization(resources)))
        shutil.rmtree(top, ignore_errors=True)
        made.rename(top)
    return top


def _kustomization(resources: list[str]) -> dict[str, Any]:
    container = "/spec/template/spec/containers/0"
    patch = [
        {"op": "replace", "path": f"{container}/image", "value": PROMETHEUS_OPERATOR_IMAGE},
        {
            "op": "replace",
            "path": f"{container}/args",
            "value": [f"--prometheus-config-reloader={CONFIG_RELOADER_IMAGE}"],
        },
        # The default limit of 200m makes every start slow.
        {"op": "remove", "path": f"{container}/resources/limits/cpu"},
    ]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": resources,
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}],
    }
