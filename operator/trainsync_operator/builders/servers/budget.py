"""The PodDisruptionBudget of one entry of spec.servers."""

from typing import Any

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import hosts, pod
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import BUDGET


def build(target: Target, server: Server) -> dict[str, Any]:
    """One server at a time may be evicted, and any that is not ready.

    Of a server of several nodes its first: with any other goes the whole of it, too.
    """
    labels = pod.labels(target.run.name, server)
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": hosts.answering(labels, server)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = names.server_name(target.run.name, server.name)
    return child(target, BUDGET, name, pod.COMPONENT, {"spec": spec}, labels)
