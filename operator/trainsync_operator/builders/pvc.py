"""The PersistentVolumeClaim made from checkpoint.storage.volumeClaimTemplate."""

from typing import Any

from trainsync.api.spec import RetentionPolicy

from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import CLAIM
from trainsync_operator.kube.objects import Object


def build(target: Target, live: Object | None = None) -> dict[str, Any] | None:
    """The claim; None when the run uses one that exists, or a bucket.

    A claim that is there (``live``) keeps its spec: nothing in a spec can change but the size, and
    an administrator may have grown the volume, which never shrinks.
    """
    template = target.run.spec.checkpoint.storage.volume_claim_template
    if template is None or target.claim_name is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [str(mode) for mode in template.access_modes],
        "resources": {"requests": {"storage": str(template.size)}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    # A reference that was applied before goes with the next apply.
    outlives = template.retention_policy is RetentionPolicy.RETAIN
    body = {"spec": spec}
    claim = child(target, CLAIM, target.claim_name, "checkpoints", body, outlives=outlives)
    if live is not None:
        claim["spec"] = {key: live["spec"][key] for key in spec if key in live["spec"]}
    return claim
