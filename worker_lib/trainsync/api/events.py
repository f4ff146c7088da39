"""Kubernetes Events about a run, as its operator and its monitor post them. Pure."""

import uuid
from datetime import datetime
from typing import Any

from trainsync.api import names
from trainsync.api.base import format_time

_LONGEST_MESSAGE = 1024  # kept short, as the API server has it for newer Events


def build(
    *,
    namespace: str,
    run: str,
    uid: str,
    reason: str,
    message: str,
    warning: bool,
    component: str,
    now: datetime,
    count: int = 1,
) -> dict[str, Any]:
    """One Event (core ``v1``) that regards the run; its name is new each time.

    Args:
        component: who posts it.
        now: when it happened (last).
        count: how often it happened.
    """
    time = format_time(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{run}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": namespace,
            "name": run,
            "uid": uid,
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
        "source": {"component": component},
        "reportingComponent": component,
        "reportingInstance": component,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": count,
    }
