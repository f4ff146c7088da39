"""Frees volumes whose claim was deleted.

``python3 -m devcluster.controlplane.reclaimer CLUSTER INDEX`` runs forever among the control
plane's programs, in place of a provisioner.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from devcluster.controlplane.kubeapi import ApiError, KubeApi
from devcluster.controlplane.storage import STORAGE_CLASS, make_volume_directory
from devcluster.paths import Cluster

_PERIOD_SECONDS = 1.0
_PER_ROUND = 8


def released_volumes(volumes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Volumes of our StorageClass whose claim was deleted."""
    return [
        volume
        for volume in volumes
        if volume["spec"].get("storageClassName") == STORAGE_CLASS
        and volume.get("status", {}).get("phase") == "Released"
    ]


def empty_directory(cluster: Cluster, name: str) -> None:
    """Give a volume a fresh directory and delete the old one.

    The old directory is renamed first: a pod that still runs behind a cut network keeps the old
    directory, and cannot write into the next claim's.
    """
    trash = cluster.volumes / ".trash" / f"{name}-{time.time_ns()}"
    trash.parent.mkdir(parents=True, exist_ok=True)
    directory = cluster.volumes / name
    if directory.exists():
        directory.rename(trash)
    make_volume_directory(cluster, name)


def empty_trash(cluster: Cluster) -> None:
    """Delete renamed directories; the next round retries failed deletions."""
    trash = cluster.volumes / ".trash"
    if not trash.exists():
        return
    for old in trash.iterdir():
        try:
            shutil.rmtree(old)
        except OSError as error:
            _say(f"could not delete {old} yet: {error}")


def reclaim_once(api: KubeApi, cluster: Cluster) -> list[str]:
    """Free some released volumes; returns their names. Raises ApiError."""
    volumes = api.get("/api/v1/persistentvolumes")["items"]
    freed = []
    for volume in released_volumes(volumes)[:_PER_ROUND]:
        name = volume["metadata"]["name"]
        empty_directory(cluster, name)
        version = volume["metadata"]["resourceVersion"]
        # With the resourceVersion: if the volume has changed, the next round checks it again.
        patch = {"metadata": {"resourceVersion": version}, "spec": {"claimRef": None}}
        api.merge_patch(f"/api/v1/persistentvolumes/{name}", patch)
        freed.append(name)
    return freed


def main(argv: list[str]) -> int:
    cluster = Cluster(argv[1], int(argv[2]))
    api = KubeApi(cluster)
    complaint = ""
    while True:
        try:
            for name in reclaim_once(api, cluster):
                _say(f"freed {name}")
            empty_trash(cluster)
            complaint = ""
        except ApiError as error:
            # The API server may be down (killed by a test): log once, retry.
            if str(error) != complaint:
                complaint = str(error)
                _say(complaint)
        time.sleep(_PERIOD_SECONDS)


def _say(sentence: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
