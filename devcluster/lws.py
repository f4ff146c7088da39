"""LWS, whose LeaderWorkerSets are servers of several nodes.

Not part of a cluster: `python3 -m devcluster lws` adds it to a running cluster.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from devcluster.addons import is_available
from devcluster.controllers import start_controller
from devcluster.controlplane.kubeapi import ApiError, KubeApi
from devcluster.images.images import LWS_IMAGE, LWS_RECIPES
from devcluster.registry import Record
from devcluster.shell import Progress
from devcluster.tools import LWS_CONFIG, Tools, ensure_lws_tools

NAMESPACE = "lws-system"
_DEPLOYMENT = "lws-controller-manager"
_UPSTREAM = "us-central1-docker.pkg.dev/k8s-staging-images/lws/lws"
_CONFIGURATION = {
    "apiVersion": "config.lws.x-k8s.io/v1alpha1",
    "kind": "Configuration",
    "leaderElection": {"leaderElect": False},
    "internalCertManagement": {"enable": True},
}
_WEBHOOKS = (
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/"
    "lws-mutating-webhook-configuration"
)


def start_lws(record: Record, progress: Progress) -> None:
    """Apply LWS and wait until it is available; repeatable.

    Raises DevclusterError.
    """
    start_controller(
        record,
        progress,
        "LWS",
        NAMESPACE,
        ensure_lws_tools(progress),
        LWS_RECIPES,
        _overlay,
        lambda api: is_available(api, NAMESPACE, _DEPLOYMENT) and _is_trusted(api),
    )


def _is_trusted(api: KubeApi) -> bool:
    """Whether the API server was given the certificate of LWS's webhooks, which LWS makes."""
    try:
        found = api.get(_WEBHOOKS)
    except ApiError as error:
        if error.status in (0, 404):
            return False
        raise
    return all(hook["clientConfig"].get("caBundle") for hook in found["webhooks"])


def _overlay(tools: Tools, directory: Path) -> Path:
    """LWS's own manifests with our image and configuration, as a folder for kustomize."""
    top = directory / "lws"
    with tempfile.TemporaryDirectory(prefix=".lws-", dir=directory) as scratch:
        made = Path(scratch) / "made"
        # kustomize needs all files below one root, with relative paths.
        shutil.copytree(tools.path(LWS_CONFIG).resolve(), made)
        configuration = made / "manager" / "controller_manager_config.yaml"
        configuration.write_text(json.dumps(_CONFIGURATION))
        (made / "kustomization.yaml").write_text(json.dumps(_kustomization()))
        shutil.rmtree(top, ignore_errors=True)
        made.rename(top)
    return top


def _kustomization() -> dict[str, Any]:
    container = "/spec/template/spec/containers/0"
    deployment = [
        {"op": "replace", "path": "/spec/replicas", "value": 1},
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {"op": "replace", "path": f"{container}/readinessProbe/periodSeconds", "value": 1},
        {"op": "remove", "path": f"{container}/resources"},
    ]
    # What it serves has one version; the webhook would only be asked in vain.
    conversion = [{"op": "remove", "path": "/spec/conversion"}]
    name, _, tag = LWS_IMAGE.rpartition(":")
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["default"],
        "images": [{"name": _UPSTREAM, "newName": name, "newTag": tag}],
        "patches": [
            {"target": {"kind": "Deployment"}, "patch": json.dumps(deployment)},
            {"target": {"kind": "CustomResourceDefinition"}, "patch": json.dumps(conversion)},
        ],
    }
