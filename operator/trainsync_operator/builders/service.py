"""The Service of the run's monitor."""

from typing import Any

from trainsync.api import names

from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube.kinds import SERVICE

MONITOR_COMPONENT = "monitor"


def build(target: Target) -> dict[str, Any]:
    """The monitor's Service."""
    spec = {
        "selector": {
            names.LABEL_RUN: target.run.name,
            names.LABEL_COMPONENT: MONITOR_COMPONENT,
        },
        "ports": [
            {
                "name": "http",
                "port": names.MONITOR_PORT,
                "targetPort": "http",
                "protocol": "TCP",
            }
        ],
    }
    name = names.monitor_name(target.run.name)
    return child(target, SERVICE, name, MONITOR_COMPONENT, {"spec": spec})
