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

# As servers share the cores with all else: one thread each, bound to none. And no part of vLLM is
# compiled (log-probabilities of prompts would be): the image has no C++ compiler.
VLLM_ON_CPU = (
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("TORCHDYNAMO_DISABLE", "1"),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_DO_NOT_TRACK", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
)


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


def servers_for_devcluster(run: Object, image: str, environment: Path, mount_path: str) -> Object:
    """A copy whose servers' pods run ``image`` with an ``environment`` of the host that has vLLM.

    The environment's own scripts name the folder that it was made in, so ``vllm`` is run as a
    module.
    """
    run = copy.deepcopy(run)
    for server in run["spec"].get("servers", []):
        spec = server["template"]["spec"]
        volume = {"name": ENV_VOLUME, "hostPath": {"path": str(environment)}}
        spec["volumes"] = [*spec.get("volumes", []), volume]
        before = spec.setdefault("initContainers", [])
        before.append({"name": "trainsync-agent"})
        for container in (*before, *spec["containers"]):
            container["image"] = image
            mount = {"name": ENV_VOLUME, "mountPath": mount_path, "readOnly": True}
            container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
        first = spec["containers"][0]
        if first["command"][0] == "vllm":
            module = ["python", "-m", "vllm.entrypoints.cli.main"]
            first["command"] = [*module, *first["command"][1:]]
        first["env"] = [*first.get("env", []), *({"name": n, "value": v} for n, v in VLLM_ON_CPU)]
    return run


def _templates(cluster: Object) -> list[Object]:
    owners = (cluster.get("head") or {}, *cluster["groups"])
    return [owner["template"] for owner in owners if owner.get("template")]
