"""The RayCluster of one entry of spec.clusters."""

import json
from typing import Any

from trainsync.api import names
from trainsync.api.spec import Cluster, Group, Role

from trainsync_operator.builders import fingerprint, gang, queue
from trainsync_operator.builders.pod_template import inject
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import RAY_CLUSTER
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import PRIORITY_LABEL, QUEUE_LABEL, SpecError

_ROLE_RESOURCES = {
    Role.TRAINER: names.RAY_RESOURCE_TRAINER,
    Role.EXPLORER: names.RAY_RESOURCE_EXPLORER,
}


def _with_role_resource(group: Group, cluster: Cluster) -> dict[str, str]:
    """The group's Ray flags with the custom resource of its role.

    KubeRay needs the value of ``resources`` quoted for a shell: ``'"{\\"name\\": 1}"'``.
    """
    given = group.ray_start_params.get("resources", "{}").strip()
    try:
        decoded = json.loads(given.strip("'"))
        resources = json.loads(decoded) if isinstance(decoded, str) else decoded
        merged = {**resources, _ROLE_RESOURCES[group.role]: 1}
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"spec.clusters[{cluster.name}].groups[{group.name}].rayStartParams.resources is not"
            f' JSON ({error}): write it as KubeRay does, \'"{{\\"name\\": 1}}"\''
        ) from error
    return {**group.ray_start_params, "resources": json.dumps(json.dumps(merged))}


def _worker_group(
    target: Target, cluster: Cluster, group: Group, *, queued: bool
) -> dict[str, Any]:
    return {
        "groupName": group.name,
        "replicas": group.replicas,
        "minReplicas": fewest(group),
        "maxReplicas": group.replicas if group.max_replicas is None else group.max_replicas,
        "rayStartParams": _with_role_resource(group, cluster),
        "template": inject(target, cluster, group, group.template, queued=queued),
    }


def fewest(group: Group) -> int:
    """Pods that the group has at least, once it is ready."""
    return group.replicas if group.min_replicas is None else group.min_replicas


def _overrides(cluster: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields that the user set of the RayCluster's spec, and of its head group."""
    if cluster.ray_cluster_overrides is None:
        return {}, {}
    spec: dict[str, Any] = cluster.ray_cluster_overrides.to_json_dict()
    kind = spec.pop("headServiceType", None)
    return spec, {"serviceType": kind} if kind else {}


def _keep_autoscaled(ray: dict[str, Any], cluster: Cluster, live: Object) -> None:
    """Leave to Ray's autoscaler what it writes into the RayCluster; the hash has no part of it."""
    of_live = {group["groupName"]: group for group in live["spec"].get("workerGroupSpecs") or []}
    autoscaled = {group.name for group in cluster.groups if group.max_replicas is not None}
    for group in ray["spec"]["workerGroupSpecs"]:
        there = of_live.get(group["groupName"])
        if there is None or group["groupName"] not in autoscaled:
            continue
        group |= {key: there[key] for key in ("replicas", "scaleStrategy") if key in there}


def build(target: Target, cluster: Cluster, live: Object | None = None) -> dict[str, Any]:
    """The RayCluster of the present cluster attempt; ``live`` is that which exists.

    Raises:
        SpecError: a flag in rayStartParams cannot be merged with ours.
    """
    labels = {
        names.LABEL_CLUSTER: cluster.name,
        names.LABEL_ATTEMPT: str(target.cluster_attempt),
        **gang.labels(target.run.labels),
    }
    for passed_on in (QUEUE_LABEL, PRIORITY_LABEL):
        if passed_on in target.run.labels:
            labels[passed_on] = target.run.labels[passed_on]
    queued = target.run.queue_name is not None or queue.manages(live)
    overrides, of_head = _overrides(cluster)
    head = {
        **of_head,
        # No task or actor may run on the head, only Ray's own processes.
        "rayStartParams": {"num-cpus": "0", **cluster.head.ray_start_params},
        "template": inject(target, cluster, None, cluster.head.template, queued=queued),
    }
    groups = [_worker_group(target, cluster, group, queued=queued) for group in cluster.groups]
    spec = {
        **overrides,
        "rayVersion": cluster.ray_version,
        "headGroupSpec": head,
        "workerGroupSpecs": groups,
    }
    name = names.ray_cluster_name(target.run.name, cluster.name, target.cluster_attempt)
    ray = child(target, RAY_CLUSTER, name, "ray", {"spec": spec}, labels)
    made_from = fingerprint.of_pods(target.run.spec, cluster)
    ray["metadata"]["annotations"][names.ANNOTATION_MADE_FROM] = made_from
    if live is not None:
        _keep_autoscaled(ray, cluster, live)
    return ray
