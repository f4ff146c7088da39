"""Queues of Kueue: whether one manages a RayCluster, and how its pods outlive a preemption."""

from typing import Any, Final

from trainsync_operator.builders.target import Target
from trainsync_operator.kube import objects
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import QUEUE_LABEL

_GRACE_SECONDS: Final = 30  # Kubernetes's default


def manages(ray: Object | None) -> bool:
    """Whether a queue manages this RayCluster.

    Kueue gives RayClusters the label of a namespace's default LocalQueue, and where it manages jobs
    without a queue it suspends them: ``suspend``, which the operator never writes, is there also
    after the admission, as false.
    """
    if ray is None:
        return False
    return QUEUE_LABEL in objects.labels(ray) or "suspend" in (ray.get("spec") or {})


def hold(target: Target, spec: dict[str, Any], ray: dict[str, Any]) -> None:
    """Let the pod outlive its preemption until the trainers have saved.

    Kueue takes the pods without a word to the run: what notice there is, is their grace period. A
    preStop command of the user's stays, and nothing holds the pod then but the longer grace. In an
    image with an older library the command fails, and the pod ends as it would without.

    Args:
        spec: of the pod.
        ray: its container that runs Ray.
    """
    seconds = target.run.spec.suspend_policy.save_deadline_seconds
    if not seconds:
        return
    spec["terminationGracePeriodSeconds"] = seconds + spec.get(
        "terminationGracePeriodSeconds", _GRACE_SECONDS
    )
    command = ["python3", "-m", "trainsync.runtime.stop.hook", str(seconds)]
    ray.setdefault("lifecycle", {}).setdefault("preStop", {"exec": {"command": command}})
