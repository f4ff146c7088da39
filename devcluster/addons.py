"""Add-ons that run in the cluster as pods: CoreDNS and the KubeRay operator."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from devcluster.controlplane.kubeapi import ApiError, KubeApi
from devcluster.controlplane.storage import storage_manifests
from devcluster.images.images import COREDNS_IMAGE, KUBERAY_IMAGE
from devcluster.paths import Cluster
from devcluster.shell import GO_ENVIRONMENT, run, write_atomically, write_json
from devcluster.tools import KUBERAY_CONFIG, Tools, cache_root

KUBERAY_NAMESPACE = "kuberay-system"
DEPLOYMENTS = (("kube-system", "coredns"), (KUBERAY_NAMESPACE, "kuberay-operator"))

# Tests kill other nodes than the first, so pods that all tests need run on the first.
_FIRST_NODE = {"kubernetes.io/hostname": "node-1"}

_COREFILE = """\
cluster.local:53 in-addr.arpa:53 {
    errors
    ready
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 5
    }
}
# Nothing here leads outside: a name that is not the cluster's does not exist, said at once.
.:53 {
    errors
    health
    template ANY ANY {
        rcode NXDOMAIN
    }
}
"""


def addons_key(cluster: Cluster) -> str:
    """A key that changes with the manifests of ``apply_addons``."""
    manifests = [storage_manifests(cluster), coredns_manifests(cluster), kuberay_overlay()]
    return hashlib.sha256(json.dumps(manifests).encode()).hexdigest()[:12]


def apply_addons(cluster: Cluster, tools: Tools) -> None:
    """Apply storage, CoreDNS and KubeRay (server-side, so repeatable)."""
    objects = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [*storage_manifests(cluster), *coredns_manifests(cluster)],
    }
    base = cluster.directory / "addons.json"
    write_json(base, objects)
    for manifests in (base, render_kuberay(tools)):
        run(
            [tools.path("kubectl"), f"--kubeconfig={cluster.kubeconfig}", "apply", "--server-side",
             "--force-conflicts", "-f", manifests],
            timeout=90,
        )  # fmt: skip


def unavailable_addons(api: KubeApi) -> list[str]:
    """Names of the Deployments with unavailable pods."""
    return [name for namespace, name in DEPLOYMENTS if not is_available(api, namespace, name)]


def is_available(api: KubeApi, namespace: str, name: str) -> bool:
    """Whether all pods of a Deployment's present spec are available."""
    try:
        deployment = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}")
    except ApiError as error:
        if error.status in (0, 404):
            return False
        raise
    status = deployment.get("status", {})
    return bool(
        status.get("observedGeneration") == deployment["metadata"]["generation"]
        and status.get("availableReplicas", 0) >= deployment["spec"]["replicas"]
        and status.get("unavailableReplicas", 0) == 0
    )


def render_kuberay(tools: Tools) -> Path:
    """KubeRay's kustomize manifests with our image; rendered once into the cache."""
    overlay = json.dumps(kuberay_overlay(), indent=2)
    key = hashlib.sha256((tools.key + overlay).encode()).hexdigest()[:12]
    rendered = cache_root() / "tools" / f"kuberay-{key}.yaml"
    if rendered.exists():
        return rendered
    with tempfile.TemporaryDirectory() as scratch:
        # kustomize needs all files below one root, with relative paths.
        shutil.copytree(tools.path(KUBERAY_CONFIG).resolve(), Path(scratch, "config"))
        top = Path(scratch, "overlay")
        top.mkdir()
        (top / "namespace.json").write_text(json.dumps(_namespace(KUBERAY_NAMESPACE)))
        (top / "kustomization.yaml").write_text(overlay)
        write_atomically(rendered, run([tools.path("kubectl"), "kustomize", top], timeout=60))
    return rendered


def kuberay_overlay() -> dict[str, Any]:
    image, _, tag = KUBERAY_IMAGE.rpartition(":")
    probe = {"initialDelaySeconds": 1, "periodSeconds": 1}
    container = {
        "name": "kuberay-operator",
        "readinessProbe": probe,
        "env": [{"name": name, "value": value} for name, value in GO_ENVIRONMENT.items()],
        # KubeRay's default limit of 100m makes the operator the slowest part of every test.
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        },
    }
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kuberay-operator"},
        "spec": {"template": {"spec": {"nodeSelector": _FIRST_NODE, "containers": [container]}}},
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": KUBERAY_NAMESPACE,
        "resources": ["namespace.json", "../config/crd", "../config/rbac", "../config/manager"],
        "images": [{"name": "kuberay/operator", "newName": image, "newTag": tag}],
        "patches": [
            {
                "target": {"kind": "Deployment", "name": "kuberay-operator"},
                "patch": json.dumps(patch),
            }
        ],
    }


def coredns_manifests(cluster: Cluster) -> list[dict[str, Any]]:
    """CoreDNS with its ServiceAccount and permissions."""
    metadata = {"name": "coredns", "namespace": "kube-system"}
    labels = {"k8s-app": "kube-dns"}
    rules = [
        {
            "apiGroups": [""],
            "resources": ["services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    container = {
        "name": "coredns",
        "image": COREDNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "resources": {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"memory": "170Mi"},
        },
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": 8181},
            "periodSeconds": 1,
        },
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": 8080},
            "initialDelaySeconds": 30,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "nodeSelector": _FIRST_NODE,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    # The Corefile's hash, so that a changed Corefile replaces the pods.
    digest = hashlib.sha256(_COREFILE.encode()).hexdigest()[:12]
    pod_metadata = {"labels": labels, "annotations": {"trainsync.dev/corefile": digest}}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "devcluster:coredns"},
            "rules": rules,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "devcluster:coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "devcluster:coredns"},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"Corefile": _COREFILE},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**metadata, "labels": labels},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": pod_metadata, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {"selector": labels, "clusterIP": cluster.dns_service, "ports": ports},
        },
    ]


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
