"""Kubernetes Events about a run, on transitions only. Best effort: a lost Event changes nothing."""

import logging
from datetime import datetime

from trainsync.api import events, names

from trainsync_operator.kube.client import Api, ApiError
from trainsync_operator.kube.kinds import EVENT
from trainsync_operator.reconcile.run import Run

_LOG = logging.getLogger(__name__)


async def post(
    api: Api, run: Run, reason: str, message: str, now: datetime, *, warning: bool
) -> None:
    """Post an Event about ``run``; a failure is only logged."""
    event = events.build(
        namespace=run.namespace,
        run=run.name,
        uid=run.uid,
        reason=reason,
        message=message,
        warning=warning,
        component=names.OPERATOR_FIELD_MANAGER,
        now=now,
    )
    try:
        await api.create(EVENT, event)
    except ApiError as error:
        _LOG.warning("event %s not posted: %s", reason, error)
