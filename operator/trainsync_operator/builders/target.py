"""Input of the builders, and the metadata that all children share."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from trainsync.api import names

from trainsync_operator.kube.kinds import CLUSTER_ROLE, RUN, Kind
from trainsync_operator.reconcile.run import Run

# As the chart of a release with the name trainsync-operator calls this role.
DEFAULT_ROLE: Final = "trainsync-operator-monitor"


@dataclass(frozen=True)
class MonitorSettings:
    """The operator's settings for monitors: their image, and the role with their rights."""

    image: str
    pull_secrets: tuple[str, ...] = ()
    """Names of pull Secrets in each run's namespace, set in every monitor's pod."""
    allowed: tuple[str, ...] = ()
    """Repositories of images that a run may name beside the default one's; a prefix ends with a
    slash, and ``*`` allows every image."""
    role: str = DEFAULT_ROLE
    """Name of the chart's role with the rights of every monitor."""
    role_kind: Kind = CLUSTER_ROLE


@dataclass(frozen=True)
class Target:
    """A run, the attempt to build, and the operator's own settings."""

    run: Run
    attempt: int
    cluster_attempt: int
    monitor: MonitorSettings

    @property
    def claim_name(self) -> str | None:
        """The PersistentVolumeClaim that holds the run's checkpoints; None: a bucket does."""
        storage = self.run.spec.checkpoint.storage
        if storage.object_store is not None:
            return None
        existing = storage.persistent_volume_claim
        return existing.claim_name if existing else names.claim_name(self.run.name)

    @property
    def checkpoint_directory(self) -> str:
        """The run's directory as its pods see it, or the URL of its bucket."""
        store = self.run.spec.checkpoint.storage.object_store
        if store is not None:
            return store.url
        path = self.run.spec.checkpoint.path or self.run.name
        return f"{names.CHECKPOINT_MOUNT}/{path}"


def child(
    target: Target,
    kind: Kind,
    name: str,
    component: str,
    body: dict[str, Any],
    labels: dict[str, str] | None = None,
    controller: dict[str, Any] | None = None,
    *,
    annotations: dict[str, str] | None = None,
    outlives: bool = False,
) -> dict[str, Any]:
    """A child of the run, with owner, labels and the hash of everything that is asked for.

    Args:
        controller: the reference to its controller, where that is not the run.
        outlives: whether it stays when the run is deleted, which is to have no owner.
    """
    run = target.run
    owner = {
        "apiVersion": RUN.api_version,
        "kind": RUN.name,
        "name": run.name,
        "uid": run.uid,
        "blockOwnerDeletion": True,
    }
    owners = [owner, controller] if controller else [{**owner, "controller": True}]
    obj: dict[str, Any] = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": name,
            "namespace": run.namespace,
            "labels": {
                names.LABEL_RUN: run.name,
                names.LABEL_COMPONENT: component,
                **(labels or {}),
            },
            "ownerReferences": owners,
        },
        **body,
    }
    if outlives:
        del obj["metadata"]["ownerReferences"]
    if annotations:
        obj["metadata"]["annotations"] = annotations
    digest = hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()[:16]
    obj["metadata"]["annotations"] = {**(annotations or {}), names.ANNOTATION_HASH: digest}
    return obj
