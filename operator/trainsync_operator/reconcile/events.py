"""Kubernetes Events about a run. Best effort: a lost Event changes nothing.

A failure is logged alone, unless the API server asks to wait: then nothing more is asked of it.
"""

import hashlib
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainsync.api import events, names

from trainsync_operator.kube.client import Api, ApiError
from trainsync_operator.kube.kinds import EVENT
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import Run

_LOG = logging.getLogger(__name__)
# A problem that is repeated within this time is counted in its first Event.
SERIES_FOR: Final = timedelta(minutes=10)


@dataclass
class _Series:
    event: str
    first: datetime
    last: datetime
    count: int


def _event(run: Run, reason: str, message: str, now: datetime, *, warning: bool) -> Object:
    return events.build(
        namespace=run.namespace,
        run=run.name,
        uid=run.uid,
        reason=reason,
        message=message,
        warning=warning,
        component=names.OPERATOR_FIELD_MANAGER,
        now=now,
    )


def _lost(reason: str, error: ApiError) -> None:
    _LOG.warning("event %s not posted: %s", reason, error)
    if error.retry_after > 0:
        raise error


class Recorder:
    """Posts Events, and counts a repeated problem in one Event, also when its message differs.

    Its methods raise `ApiError` where the API server asks to wait.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._series: dict[tuple[str, str], _Series] = {}
        # By namespace and name, so that a run which went unseen leaves nothing for ever.
        self._told: dict[tuple[str, str], tuple[str, str]] = {}

    async def transition(
        self, run: Run, reason: str, message: str, now: datetime, *, warning: bool = False
    ) -> None:
        """Tell what has happened to ``run``, in an Event of its own."""
        try:
            await self._api.create(EVENT, _event(run, reason, message, now, warning=warning))
        except ApiError as error:
            _lost(reason, error)

    async def once(self, run: Run, reason: str, message: str, now: datetime) -> None:
        """Warn of what does not stop ``run``, unless the last such warning said the same.

        The Event's name is made of its words, so that another operator does not say them again.
        """
        said = (run.uid, message)
        if self._told.get((run.namespace, run.name)) == said:
            return
        self._told[run.namespace, run.name] = said
        event = _event(run, reason, message, now, warning=True)
        digest = hashlib.sha256(f"{run.uid} {reason} {message}".encode()).hexdigest()[:16]
        event["metadata"]["name"] = f"{run.name}.{digest}"
        try:
            await self._api.create(EVENT, event)
        except ApiError as error:
            if error.retry_after > 0:
                self.gone(run.namespace, run.name)  # it is told after the wait
            if error.status != 409:
                _lost(reason, error)

    def gone(self, namespace: str, name: str) -> None:
        """Forget a run that is gone, or is being deleted."""
        self._told.pop((namespace, name), None)

    async def problem(self, run: Run, reason: str, message: str, now: datetime) -> None:
        """Warn of what stops ``run``."""
        self._forget(now)
        event = _event(run, reason, message, now, warning=True)
        series = self._series.get((run.uid, reason))
        try:
            if series is None:
                name = event["metadata"]["name"]
                self._series[run.uid, reason] = _Series(name, now, now, 1)
                await self._api.create(EVENT, event)
                return
            series.count, series.last = series.count + 1, now
            counted = events.again(event, series.event, series.first, series.count)
            await self._api.apply(EVENT, counted)
        except ApiError as error:
            _lost(reason, error)

    def _forget(self, now: datetime) -> None:
        old = [key for key, series in self._series.items() if now - series.last > SERIES_FOR]
        for key in old:
            del self._series[key]
