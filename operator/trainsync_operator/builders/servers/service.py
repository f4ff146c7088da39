"""The Service of one entry of spec.servers: it routes to servers whose agent says ready."""

from typing import Any

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import hosts, pod
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import SERVICE


def build(target: Target, server: Server) -> dict[str, Any]:
    """The Service."""
    labels = pod.labels(target.run.name, server)
    port = {"name": "http", "port": server.port, "targetPort": server.port, "protocol": "TCP"}
    name = names.server_name(target.run.name, server.name)
    selector = hosts.answering(labels, server)
    body = {"spec": {"selector": selector, "ports": [port]}}
    return child(target, SERVICE, name, pod.COMPONENT, body, labels)
