"""Builds the Kubernetes Events that the operator and the monitor post about a run. Pure."""

import uuid
from datetime import datetime
from typing import Any

from trainsync.api import names
from trainsync.api.base import format_time

_LONGEST_MESSAGE = 1024  # the API server's limit for events.k8s.io/v1


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
    """One Event (core ``v1``) about the run, with a new unique name.

    Args:
        component: the program that posts the Event.
        now: time of the last occurrence.
        count: number of occurrences.
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


def again(event: dict[str, Any], name: str, first: datetime, count: int) -> dict[str, Any]:
    """The Event ``name``, which was posted at ``first``, when it has occurred ``count`` times.

    Args:
        event: the last occurrence, as `build` makes it.
    """
    last = event["lastTimestamp"]
    return {
        **event,
        "metadata": {**event["metadata"], "name": name},
        "firstTimestamp": format_time(first),
        "count": count,
        # The one time of Kubernetes that has microseconds.
        "series": {"count": count, "lastObservedTime": last.replace("Z", ".000000Z")},
    }
