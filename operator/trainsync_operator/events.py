"""Kubernetes Events about a run, on transitions only. Best effort: a lost Event changes nothing."""

import logging
import uuid
from datetime import datetime
from typing import Any

from trainsync.api import names
from trainsync.api.base import format_time

from trainsync_operator.client import Api, ApiError
from trainsync_operator.kinds import EVENT, RUN

_LOG = logging.getLogger(__name__)


def build(
    *, namespace: str, run: str, uid: str, reason: str, message: str, warning: bool, now: datetime
) -> dict[str, Any]:
    """One Event that regards the run."""
    time = format_time(now)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": f"{run}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": RUN.api_version,
            "kind": RUN.name,
            "namespace": namespace,
            "name": run,
            "uid": uid,
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:1024],
        "source": {"component": names.OPERATOR_FIELD_MANAGER},
        "reportingComponent": names.OPERATOR_FIELD_MANAGER,
        "reportingInstance": names.OPERATOR_FIELD_MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


async def post(api: Api, event: dict[str, Any]) -> None:
    """Send an Event; a failure is logged and forgotten."""
    try:
        await api.create(EVENT, event)
    except ApiError as error:
        _LOG.warning("event %s not posted: %s", event["reason"], error)
