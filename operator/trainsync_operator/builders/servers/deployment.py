"""The Deployment of one entry of spec.servers."""

from typing import Any, Final

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import pod
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import DEPLOYMENT
from trainsync_operator.kube.objects import Object

# No server goes before another one is ready in its place.
_STRATEGY: Final = {
    "type": "RollingUpdate",
    "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
}


def build(
    target: Target, server: Server, live: Object | None = None, *, serves: bool = True
) -> dict[str, Any]:
    """The Deployment; ``live`` is that which exists.

    Args:
        serves: whether it has any pods now.

    Raises:
        SpecError: no pod can be built from the template.
    """
    labels = pod.labels(target.run.name, server)
    spec: dict[str, Any] = {
        "strategy": _STRATEGY,
        "selector": {"matchLabels": labels},
        "template": pod.template(target, server),
    }
    if not serves:
        spec["replicas"] = 0
    elif server.replicas is not None:
        spec["replicas"] = server.replicas
    name = names.server_name(target.run.name, server.name)
    deployment = child(target, DEPLOYMENT, name, pod.COMPONENT, {"spec": spec}, labels)
    now = 1 if live is None else live["spec"].get("replicas", 1)
    keep_scaled(deployment, server, live, now, serves=serves)
    return deployment


def keep_scaled(
    desired: Object, server: Server, live: Object | None, now: int, *, serves: bool
) -> None:
    """Keep the number of replicas that a user or an autoscaler set; the hash has no part of it.

    A suspension sets the number to 0, and keeps the former one for the resume.

    Args:
        now: the number that ``live`` is asked for.
    """
    kept = "" if live is None else objects.annotations(live).get(names.ANNOTATION_REPLICAS, "")
    if not serves:
        before = kept or now if server.replicas is None else server.replicas
        desired["metadata"]["annotations"][names.ANNOTATION_REPLICAS] = str(before)
    elif server.replicas is None and live is not None:
        desired["spec"]["replicas"] = int(kept) if kept.isdecimal() else now
