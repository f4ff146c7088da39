"""Adds identity, checkpoint storage and token to the pod templates of Ray pods."""

import copy
from typing import Any, Final

from trainsync.api import env, names
from trainsync.api.spec import CheckpointMemory, Cluster, Group, Role, SyncMethod, SyncStore

from trainsync_operator.builders import bucket, node_loss, queue
from trainsync_operator.builders.target import Target

_CHECKPOINT_VOLUME: Final = "trainsync-checkpoints"
_TOKEN_VOLUME: Final = "trainsync-token"
_KEPT_VOLUME: Final = "trainsync-kept"
_TOKEN_SECONDS: Final = 3600
ROLE_HEAD: Final = "Head"
_ZONE: Final = "topology.kubernetes.io/zone"
# A value in the template takes precedence over these.
#
# How often Ray deletes unused objects. Ray's default is one second, during which two versions of
# the weights would take the store's memory.
_RAY_DEFAULT: Final = {"name": "RAY_free_objects_period_milliseconds", "value": "10"}


def _environment(target: Target, cluster: Cluster, group: Group | None) -> dict[str, str]:
    spec, run = target.run.spec, target.run
    variables = {
        env.RUN_NAME: run.name,
        env.RUN_NAMESPACE: run.namespace,
        env.RUN_UID: run.uid,
        env.CLUSTER: cluster.name,
        env.ROLE: group.role if group else ROLE_HEAD,
        env.ATTEMPT: str(target.cluster_attempt),
        env.MONITOR_URL: names.monitor_url(run.name, run.namespace),
        env.TOKEN_FILE: names.TOKEN_FILE,
        env.CHECKPOINT_DIR: target.checkpoint_directory,
        env.CHECKPOINT_INTERVAL: str(spec.checkpoint.interval),
        env.CHECKPOINT_SAVE_STRATEGY: spec.checkpoint.save_strategy,
        env.CHECKPOINT_VERIFY: spec.checkpoint.verify,
        env.SYNC_METHOD: spec.sync.method,
        env.SYNC_INTERVAL: str(spec.sync.interval),
        env.SYNC_TIMEOUT_SECONDS: str(spec.sync.timeout_seconds),
        env.SYNC_STYLE: spec.sync.style,
        env.SYNC_OFFSET: str(spec.sync.offset),
    }
    if run.servers:
        variables[env.SERVER_URLS] = ",".join(
            f"{one.name}={names.server_url(run.name, run.namespace, one.name, one.port)}"
            for one in run.servers
        )
    if run.explorers_apart:
        variables[env.TRAINER_CLUSTER] = run.trainer_cluster.name
    if group:
        variables[env.GROUP] = group.name
    if spec.checkpoint.max_to_keep is not None:
        variables[env.CHECKPOINT_MAX_TO_KEEP] = str(spec.checkpoint.max_to_keep)
    if spec.checkpoint.save_timeout_seconds is not None:
        variables[env.CHECKPOINT_SAVE_TIMEOUT] = str(spec.checkpoint.save_timeout_seconds)
    if spec.checkpoint.storage.incremental:
        variables[env.CHECKPOINT_INCREMENTAL] = "true"
    if (memory := _memory(target, group)) is not None:
        variables[env.CHECKPOINT_MEMORY] = str(memory.budget)
        variables[env.CHECKPOINT_MEMORY_DIR] = names.KEPT_MOUNT
        if memory.copies:
            variables[env.CHECKPOINT_MEMORY_COPIES] = str(memory.copies)
    if spec.sync.bucket_size is not None:
        variables[env.SYNC_BUCKET_SIZE] = str(spec.sync.bucket_size)
    if spec.sync.delta:
        variables[env.SYNC_DELTA] = "true"
    if spec.sync.max_staleness is not None:
        variables[env.SYNC_MAX_STALENESS] = str(spec.sync.max_staleness)
    if spec.sync.store is not None:
        variables |= of_store(spec.sync.store)
    return variables


def of_store(store: SyncStore) -> dict[str, str]:
    """Variables with the place of the store of weights."""
    given = {
        env.SYNC_STORE_URL: store.url,
        env.SYNC_STORE_ENDPOINT: store.endpoint,
        env.SYNC_STORE_REGION: store.region,
        env.SYNC_STORE_ALLOW_HTTP: "true" if store.allow_http else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def store_keys(store: SyncStore | None, *, reads: bool) -> list[dict[str, Any]]:
    """What opens the store of weights.

    Args:
        reads: the pod's processes take weights and publish none.
    """
    if store is None:
        return []
    chosen = store.read_credentials if reads and store.read_credentials else store.credentials
    return bucket.credentials(store, chosen, env.SYNC_STORE_CREDENTIAL_PREFIX)


def _only_reads(target: Target, cluster: Cluster, group: Group | None) -> bool:
    """Whether the pod's processes publish no weights: those of explorers, and of their head where
    trainers are in another cluster."""
    if group is None:
        return cluster.name != target.run.trainer_cluster.name
    return group.role is Role.EXPLORER


def _may_save(group: Group | None) -> bool:
    """Whether processes of the pod save, or hand their settings to those that do, as the head's."""
    return group is None or group.role is Role.TRAINER


def _memory(target: Target, group: Group | None) -> CheckpointMemory | None:
    """How the pod's processes keep shards in memory; None: they keep none."""
    memory = target.run.spec.checkpoint.memory
    return memory if memory is not None and memory.enabled and _may_save(group) else None


def replace_named(
    entries: list[dict[str, Any]], ours: list[dict[str, Any]], key: str
) -> list[dict[str, Any]]:
    """``entries`` with ours added; ours replace entries of the same name."""
    taken = {entry[key] for entry in ours}
    return [entry for entry in entries if entry.get(key) not in taken] + ours


def run_mounts(target: Target, *, saves: bool = True) -> list[dict[str, Any]]:
    """Mounts of `run_volumes`."""
    token = {"name": _TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True}
    if target.claim_name is None or not saves:
        return [token]
    return [{"name": _CHECKPOINT_VOLUME, "mountPath": names.CHECKPOINT_MOUNT}, token]


def run_volumes(target: Target, audience: str, *, saves: bool = True) -> list[dict[str, Any]]:
    """The run's checkpoints, unless a bucket has them, and a token of the pod for the monitor.

    Args:
        saves: whether the pod reads or writes checkpoints.
    """
    source = {"audience": audience, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    token = {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": source}]}}
    if target.claim_name is None or not saves:
        return [token]
    claim = {"claimName": target.claim_name}
    return [{"name": _CHECKPOINT_VOLUME, "persistentVolumeClaim": claim}, token]


def share_group(spec: dict[str, Any]) -> None:
    """Put a pod into the group that shares the run's volume, unless its template says otherwise."""
    security = spec.setdefault("securityContext", {})
    security.setdefault("fsGroup", names.FS_GROUP)
    security.setdefault("supplementalGroups", [names.FS_GROUP])


def pod_labels(target: Target, cluster: Cluster, group: Group | None) -> dict[str, str]:
    """Labels by which the operator finds the pods of a run and their roles."""
    labels = {
        names.LABEL_RUN: target.run.name,
        names.LABEL_CLUSTER: cluster.name,
        names.LABEL_ROLE: group.role if group else ROLE_HEAD,
        names.LABEL_ATTEMPT: str(target.cluster_attempt),
        names.LABEL_COMPONENT: "ray",
    }
    if group:
        labels[names.LABEL_GROUP] = group.name
    return labels


def _tracker_defaults(target: Target) -> list[dict[str, str]]:
    """One run of Weights & Biases for all attempts, as wandb reads it."""
    return [
        {"name": "WANDB_RUN_ID", "value": target.run.uid},
        {"name": "WANDB_NAME", "value": target.run.name},
        {"name": "WANDB_RESUME", "value": "allow"},
    ]


def _failure_domain(target: Target, group: Group | None) -> list[dict[str, Any]]:
    """The zone of the pod's node, where copies of shards go to another one.

    Kubernetes copies the label of the node to the pod; without it the variable is empty.
    """
    memory = _memory(target, group)
    if memory is None or not memory.copies:
        return []
    zone = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{_ZONE}']"}}
    return [{"name": env.FAILURE_DOMAIN, "valueFrom": zone}]


def inject(
    target: Target,
    cluster: Cluster,
    group: Group | None,
    template: dict[str, Any] | None,
    *,
    queued: bool,
) -> dict[str, Any]:
    """The user's pod template with trainsync's additions.

    The first container runs Ray (KubeRay's convention) and gets all additions.

    Args:
        group: None for the head.
        queued: whether a queue may take the pod.
    """
    result: dict[str, Any] = copy.deepcopy(template) if template else {}
    metadata = result.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **pod_labels(target, cluster, group)}
    spec = result.setdefault("spec", {})

    containers = spec.setdefault("containers", [{}])
    first = containers[0]
    first.setdefault("name", "ray-worker" if group else "ray-head")
    if not first.get("image"):
        first["image"] = cluster.image
    environment = _environment(target, cluster, group)
    variables: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in environment.items()]
    node = {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}
    variables.append({"name": env.NODE_NAME, "valueFrom": node})
    reads = _only_reads(target, cluster, group)
    of_commits = reads and target.run.spec.sync.method is SyncMethod.CHECKPOINT
    variables += bucket.of_run(target, opens=_may_save(group), reads=of_commits)
    variables += store_keys(target.run.spec.sync.store, reads=reads)
    defaults = [_RAY_DEFAULT, *_tracker_defaults(target), *_failure_domain(target, group)]
    own = replace_named(defaults, first.get("env") or [], "name")
    first["env"] = replace_named(own, variables, "name")
    own_mounts = first.get("volumeMounts") or []
    first["volumeMounts"] = replace_named(own_mounts, run_mounts(target), "mountPath")

    audience = names.token_audience(target.run.uid, target.cluster_attempt)
    volumes = run_volumes(target, audience)
    if (memory := _memory(target, group)) is not None:
        # A file system of its own: what fills it takes nothing from Ray's, in /dev/shm.
        in_memory = {"medium": "Memory", "sizeLimit": str(memory.budget)}
        volumes = [*volumes, {"name": _KEPT_VOLUME, "emptyDir": in_memory}]
        mount = {"name": _KEPT_VOLUME, "mountPath": names.KEPT_MOUNT}
        first["volumeMounts"] = replace_named(first["volumeMounts"], [mount], "mountPath")
    spec["volumes"] = replace_named(spec.get("volumes") or [], volumes, "name")
    share_group(spec)
    spec["tolerations"] = node_loss.tolerations(spec.get("tolerations"))
    # The last lines of a container whose failure ends the pod come into the pod's status.
    for container in [*(spec.get("initContainers") or []), first]:
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if queued:
        queue.hold(target, spec, first)
    # A Ray process restarted in the same pod cannot rejoin its cluster, so KubeRay replaces the
    # pod.
    spec["restartPolicy"] = "Never"
    return result
