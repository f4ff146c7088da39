"""Persistent volumes: a pool of directories on this machine, and the default StorageClass.

The volumes are of type ``local`` (so that fsGroup is honoured), and every node sees the same
directory, so that one claim serves pods of several nodes. There is no provisioner: the reclaimer
(``devcluster.controlplane.reclaimer``) empties and frees a volume when its claim is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from devcluster.paths import Cluster

STORAGE_CLASS = "devcluster"
VOLUMES = 24
_SIZE = "20Gi"


def volume_name(number: int) -> str:
    return f"devcluster-{number:02d}"


def make_volume_directory(cluster: Cluster, name: str) -> Path:
    """Make a volume's directory, open to every user: pods run as any."""
    directory = cluster.volumes / name
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)
    return directory


def ensure_volume_directories(cluster: Cluster) -> None:
    for number in range(1, VOLUMES + 1):
        if not (cluster.volumes / volume_name(number)).exists():
            make_volume_directory(cluster, volume_name(number))


def storage_manifests(cluster: Cluster) -> list[dict[str, Any]]:
    """The StorageClass and all volumes."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaimPolicy": "Retain",
        # All volumes are equal and reach every node, so there is no need to wait for a pod.
        "volumeBindingMode": "Immediate",
    }
    return [storage_class, *(_volume(cluster, volume_name(n)) for n in range(1, VOLUMES + 1))]


def _volume(cluster: Cluster, name: str) -> dict[str, Any]:
    any_node = {"key": "kubernetes.io/hostname", "operator": "Exists"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": _SIZE},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": str(cluster.volumes / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [any_node]}]}},
        },
    }
