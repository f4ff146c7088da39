"""The PodDisruptionBudget of one entry of spec.servers."""

from typing import Any

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import pod
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import BUDGET


def build(target: Target, server: Server) -> dict[str, Any]:
    """One server at a time may be evicted, and any that is not ready."""
    labels = pod.labels(target.run.name, server)
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": labels},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = names.server_name(target.run.name, server.name)
    return child(target, BUDGET, name, pod.COMPONENT, {"spec": spec}, labels)
