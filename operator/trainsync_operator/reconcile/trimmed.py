"""The fields that the store keeps: those that `observed`, `apply` and `plan` read; pure."""

from typing import Any, Final

from trainsync.api.pods import is_gpu

from trainsync_operator.builders.servers.hosts import LABEL_RANK
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    SERVICE,
    Kind,
)
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import last_words

_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_POD_METADATA: Final = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds", "labels", "ownerReferences",
)  # fmt: skip
_CONTAINER_STATUS: Final = ("name", "state", "lastState")
_CONDITION: Final = ("type", "status", "reason", "message")
# Controllers write the rest of a status often, and nothing follows from it.
_STATUS: Final[dict[Kind, tuple[str, ...]]] = {
    DEPLOYMENT: ("observedGeneration", "readyReplicas", "updatedReplicas"),
    RAY_CLUSTER: ("observedGeneration", "head"),
    RAY_JOB: ("jobStatus", "jobDeploymentStatus", "message", "endTime"),
    SERVICE: (),
    LEADER_WORKER_SET: (),
}
# Of a condition a time is read only where a head became ready.
_TIMED: Final = (*_CONDITION, "lastTransitionTime")


def _only(fields: tuple[str, ...], obj: dict[str, Any]) -> dict[str, Any]:
    return {key: obj[key] for key in fields if key in obj}


def _containers(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    # The values of secrets are masked in a container's last lines.
    return [
        {
            "name": container.get("name"),
            "env": last_words.secret_entries(container),
            "resources": {"limits": _gpus(container)},
        }
        for container in spec.get(key) or []
    ]


def _gpus(container: dict[str, Any]) -> dict[str, Any]:
    limits = (container.get("resources") or {}).get("limits") or {}
    return {name: value for name, value in limits.items() if is_gpu(name)}


def _pod(obj: Object) -> Object:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    # Of servers of several nodes: a started leader says that all have joined it.
    fields = (*_CONTAINER_STATUS, "started") if LABEL_RANK in objects.labels(obj) else None
    lists: dict[str, Any] = {
        key: [_only(fields or _CONTAINER_STATUS, entry) for entry in status.get(key) or []]
        for key in ("initContainerStatuses", "containerStatuses")
    }
    conditions = [_only(_CONDITION, entry) for entry in status.get("conditions") or []]
    containers = {key: _containers(spec, key) for key in ("initContainers", "containers")}
    return {
        "metadata": _only(_POD_METADATA, obj["metadata"]),
        "spec": {**_only(("nodeName",), spec), **containers},
        "status": {**_only(("phase", "reason"), status), **lists, "conditions": conditions},
    }


def trim(kind: Kind, obj: Object) -> Object:
    """An object without the fields that the operator never reads; of a pod little is left."""
    if kind is POD:
        return _pod(obj)
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    if _LAST_APPLIED in (meta.get("annotations") or {}):
        without = {key: value for key, value in meta["annotations"].items() if key != _LAST_APPLIED}
        meta["annotations"] = without
    kept = {**obj, "metadata": meta}
    if kind in _STATUS and "status" in obj:
        kept["status"] = _status(kind, obj["status"] or {})
    return kept


def _status(kind: Kind, status: dict[str, Any]) -> dict[str, Any]:
    found = _only(_STATUS[kind], status)
    if "head" in found:
        found["head"] = _only(("serviceName",), found["head"] or {})
    if "conditions" in status:
        found["conditions"] = [_only(_TIMED, entry) for entry in status["conditions"] or []]
    return found
