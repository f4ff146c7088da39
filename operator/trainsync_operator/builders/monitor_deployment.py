"""The Deployment of the run's monitor: one pod, never two at once."""

from typing import Any, Final

from trainsync.api import env, names
from trainsync.api.mirror import Mirror

from trainsync_operator.builders import bucket, node_loss
from trainsync_operator.builders.service import MONITOR_COMPONENT
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import DEPLOYMENT

_DEFAULT_RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    "limits": {"memory": "512Mi"},
}
_CHECKPOINT_MOUNT: Final = {"name": "checkpoints", "mountPath": names.CHECKPOINT_MOUNT}


def _environment(target: Target) -> list[dict[str, Any]]:
    spec, run = target.run.spec, target.run
    variables = {
        env.RUN_NAME: run.name,
        env.RUN_NAMESPACE: run.namespace,
        env.RUN_UID: run.uid,
        env.CHECKPOINT_DIR: target.checkpoint_directory,
        env.CHECKPOINT_VERIFY: spec.checkpoint.verify,
        env.SYNC_METHOD: spec.sync.method,
        env.SYNC_INTERVAL: str(spec.sync.interval),
        env.LOG_LEVEL: spec.monitor.log_level,
    }
    if spec.checkpoint.max_to_keep is not None:
        variables[env.CHECKPOINT_MAX_TO_KEEP] = str(spec.checkpoint.max_to_keep)
    if spec.checkpoint.save_timeout_seconds is not None:
        variables[env.CHECKPOINT_SAVE_TIMEOUT] = str(spec.checkpoint.save_timeout_seconds)
    if spec.checkpoint.storage.object_store is not None:  # where readers have no leases
        variables[env.SYNC_TIMEOUT_SECONDS] = str(spec.sync.timeout_seconds)
    mirror = spec.checkpoint.mirror
    if mirror is not None:
        variables |= _of_mirror(mirror)
    entries: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in variables.items()]
    entries += bucket.of_run(target)
    if mirror is not None:
        entries += bucket.credentials(mirror, mirror.credentials)
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}
    return [*entries, {"name": env.POD_NAME, "valueFrom": source}]


def _of_mirror(mirror: Mirror) -> dict[str, str]:
    given = {
        env.MIRROR_URL: mirror.url,
        env.MIRROR_ENDPOINT: mirror.endpoint,
        env.MIRROR_REGION: mirror.region,
        env.MIRROR_ALLOW_HTTP: "true" if mirror.allow_http else None,
        env.MIRROR_KEEP_LAST: str(mirror.keep_last),
        env.MIRROR_KEEP_EVERY: None if mirror.keep_every is None else str(mirror.keep_every),
        env.MIRROR_UPLOAD_BYTES_PER_SECOND: (
            None if mirror.upload_bytes_per_second is None else str(mirror.upload_bytes_per_second)
        ),
    }
    return {name: value for name, value in given.items() if value is not None}


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _container(target: Target) -> dict[str, Any]:
    monitor = target.run.spec.monitor
    resources = monitor.resources.to_json_dict() if monitor.resources else _DEFAULT_RESOURCES
    return {
        "name": MONITOR_COMPONENT,
        "image": monitor.image or target.monitor.image,
        "command": ["python3", "-m", "trainsync.monitor"],
        "env": _environment(target),
        "ports": [{"name": "http", "containerPort": names.MONITOR_PORT, "protocol": "TCP"}],
        "resources": resources,
        # A starting monitor reads every receipt and manifest on the volume, which may take minutes.
        "startupProbe": _probe("/healthz", 2, 150),
        "livenessProbe": _probe("/healthz", 10, 3),
        "readinessProbe": _probe("/readyz", 2, 3),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *([] if target.claim_name is None else [dict(_CHECKPOINT_MOUNT)]),
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- the pod's own emptyDir
        ],
    }


def image_of(deployment: dict[str, Any]) -> str | None:
    """The image of the monitor of a Deployment that exists."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    return next((c["image"] for c in containers if c["name"] == MONITOR_COMPONENT), None)


def build(target: Target, replicas: int = 1) -> dict[str, Any]:
    """The monitor's Deployment; with 0 ``replicas`` once the run needs it no more."""
    labels = {names.LABEL_RUN: target.run.name, names.LABEL_COMPONENT: MONITOR_COMPONENT}
    name = names.monitor_name(target.run.name)
    pod: dict[str, Any] = {
        "serviceAccountName": name,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.FS_GROUP,
            "runAsGroup": names.FS_GROUP,
            "fsGroup": names.FS_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # The Lease keeps the one on a lost node and the next from committing both.
        "tolerations": node_loss.tolerations(),
        "containers": [_container(target)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if target.claim_name is not None:
        claim = {"claimName": target.claim_name}
        pod["volumes"].insert(0, {"name": "checkpoints", "persistentVolumeClaim": claim})
    if target.monitor.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in target.monitor.pull_secrets]
    spec = {
        "replicas": replicas,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": {**target.run.spec.monitor.pod_labels, **labels}},
            "spec": pod,
        },
    }
    return child(target, DEPLOYMENT, name, MONITOR_COMPONENT, {"spec": spec})
