"""The PersistentVolumeClaim made from checkpoint.storage.volumeClaimTemplate."""

from typing import Any

from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import CLAIM


def build(target: Target) -> dict[str, Any] | None:
    """The claim; None when the run uses an existing claim."""
    template = target.run.spec.checkpoint.storage.volume_claim_template
    if template is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [str(mode) for mode in template.access_modes],
        "resources": {"requests": {"storage": str(template.size)}},
    }
    if template.storage_class_name is not None:
        spec["storageClassName"] = template.storage_class_name
    return child(target, CLAIM, target.claim_name, "checkpoints", {"spec": spec})
