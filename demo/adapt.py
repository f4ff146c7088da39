"""Adapts a TrainingRun to its cluster: pure.

A manifest names an image with all packages. On devcluster the images have other names, and the
large Python packages are mounted from the host (see images/pod_env.py).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

Object = dict[str, Any]

ENV_VOLUME = "trainsync-env"
# KubeRay's own probe begins after 10 s and repeats every 5 s, longer than needed on one machine.
QUICK_PROBE = {
    "httpGet": {"path": "/api/healthz", "port": 52365},
    "initialDelaySeconds": 2,
    "periodSeconds": 1,
    "timeoutSeconds": 3,
    "failureThreshold": 60,
}


def with_image(run: Object, image: str) -> Object:
    """A copy whose Ray pods all run ``image``, in place of the templates' images."""
    run = copy.deepcopy(run)
    for cluster in run["spec"]["clusters"]:
        cluster["image"] = image
        for template in _templates(cluster):
            for container in template["spec"]["containers"][:1]:
                container.pop("image", None)
    return run


def for_devcluster(run: Object, image: str, environment: Path, mount_path: str) -> Object:
    """A copy for devcluster: ``environment`` of the host mounted read-only, quick probes."""
    run = with_image(run, image)
    for cluster in run["spec"]["clusters"]:
        for owner in (cluster.setdefault("head", {}), *cluster["groups"]):
            owner.setdefault("template", {"spec": {"containers": [{"name": "ray"}]}})
        for template in _templates(cluster):
            spec = template["spec"]
            volume = {"name": ENV_VOLUME, "hostPath": {"path": str(environment)}}
            spec["volumes"] = [*spec.get("volumes", []), volume]
            ray = spec["containers"][0]
            mount = {"name": ENV_VOLUME, "mountPath": mount_path, "readOnly": True}
            ray["volumeMounts"] = [*ray.get("volumeMounts", []), mount]
            ray.setdefault("readinessProbe", QUICK_PROBE)
    return run


def _templates(cluster: Object) -> list[Object]:
    owners = (cluster.get("head") or {}, *cluster["groups"])
    return [owner["template"] for owner in owners if owner.get("template")]
