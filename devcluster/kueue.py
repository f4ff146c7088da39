"""A Kueue for RayClusters, to test how runs share a queue.

Not part of a cluster: `python3 -m devcluster kueue` adds it to a running cluster.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from devcluster.addons import is_available
from devcluster.controllers import start_controller
from devcluster.images.images import KUEUE_IMAGE, KUEUE_RECIPES
from devcluster.registry import Record
from devcluster.shell import Progress
from devcluster.tools import KUEUE_CONFIG, Tools, ensure_kueue_tools

NAMESPACE = "kueue-system"
_DEPLOYMENT = "kueue-controller-manager"
_UPSTREAM = "us-central1-docker.pkg.dev/k8s-staging-images/kueue/kueue"
# Of a namespace whose jobs are Kueue's, those without a queue too; it manages no others.
MANAGED_LABEL = "trainsync.dev/managed-by-kueue"
# Both kinds are Kueue's, as in its default configuration: it must leave the jobs of runs alone.
_CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "health": {"healthProbeBindAddress": ":8081"},
    "metrics": {"bindAddress": ":8443"},
    "webhook": {"port": 9443},
    "leaderElection": {"leaderElect": False},
    "manageJobsWithoutQueueName": True,
    "managedJobsNamespaceSelector": {"matchLabels": {MANAGED_LABEL: "true"}},
    "integrations": {"frameworks": ["ray.io/rayjob", "ray.io/raycluster"]},
    # Off by default in 0.17: priorities may be raised by what a preemption would cost.
    "featureGates": {"PriorityBoost": True},
}
# The other webhooks are for nearly all pods and jobs: with Kueue away nothing would start.
_WEBHOOKS = re.compile(r"^[mv](ray\w+|workload|clusterqueue|cohort|resourceflavor|localqueue)\.")


def start_kueue(record: Record, progress: Progress) -> None:
    """Apply Kueue and wait until it is available; repeatable.

    Raises DevclusterError.
    """
    start_controller(
        record,
        progress,
        "Kueue",
        NAMESPACE,
        ensure_kueue_tools(progress),
        KUEUE_RECIPES,
        _overlay,
        lambda api: is_available(api, NAMESPACE, _DEPLOYMENT),
    )


def _overlay(tools: Tools, directory: Path) -> Path:
    """Kueue's own manifests with our image and configuration, as a folder for kustomize."""
    top = directory / "kueue"
    with tempfile.TemporaryDirectory(prefix=".kueue-", dir=directory) as scratch:
        made = Path(scratch) / "made"
        # kustomize needs all files below one root, with relative paths.
        shutil.copytree(tools.path(KUEUE_CONFIG).resolve(), made)
        configuration = made / "components" / "manager" / "controller_manager_config.yaml"
        configuration.write_text(json.dumps(_CONFIGURATION))
        webhooks = (made / "components" / "webhook" / "manifests.yaml").read_text()
        (made / "kustomization.yaml").write_text(json.dumps(_kustomization(webhooks)))
        shutil.rmtree(top, ignore_errors=True)
        made.rename(top)
    return top


def _kustomization(webhooks: str) -> dict[str, Any]:
    container = "/spec/template/spec/containers/0"
    deployment = [
        {"op": "replace", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {"op": "replace", "path": f"{container}/readinessProbe/periodSeconds", "value": 1},
        {"op": "remove", "path": f"{container}/resources"},
    ]
    patches = [{"target": {"kind": "Deployment"}, "patch": json.dumps(deployment)}]
    for kind in ("Mutating", "Validating"):
        unwanted = [
            {"name": name, "$patch": "delete"}
            for name in re.findall(rf"name: ({kind[0].lower()}\S+\.kb\.io)", webhooks)
            if not _WEBHOOKS.match(name)
        ]
        patch = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": f"kueue-{kind.lower()}-webhook-configuration"},
            "webhooks": unwanted,
        }
        patches.append({"target": {"kind": patch["kind"]}, "patch": json.dumps(patch)})
    name, _, tag = KUEUE_IMAGE.rpartition(":")
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["default"],
        "images": [{"name": _UPSTREAM, "newName": name, "newTag": tag}],
        "patches": patches,
    }
