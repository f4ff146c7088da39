"""Writes the monitor's part of ``TrainingRun.status``: only when different, at most every 2 s."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from trainsync.api.base import format_time
from trainsync.api.status import RestartsInPlace, WeightsStatus
from trainsync.kube.client import KubeError
from trainsync.monitor.core.views import (
    ABSENT_STATES,
    ConditionView,
    CoreView,
    with_servers,
)
from trainsync.monitor.kube.client import KubeApi
from trainsync.monitor.kube.run_reader import StaleRunError

_LOG = logging.getLogger(__name__)

SHORTEST_INTERVAL: Final = 2.0
_LONGEST_WAIT: Final = 30.0
_ACCOUNT_SECONDS: Final = 60.0  # where nothing else is new, the account is written so often
_KEPT: Final = ("progress", "weights", "atRisk", "account")
_NEWER: Final = ("account", "restartsInPlace")  # than the first release's CRD
# The API server's words for a field that is newer than the CRD; it refuses the whole status then.
_NOT_IN_THE_CRD: Final = "field not declared in schema"


def weights_in(status: Mapping[str, Any]) -> WeightsStatus | None:
    """The weights of a run's status; None: there are none, or another version's."""
    try:
        return WeightsStatus.model_validate(status.get("weights"), extra="ignore")
    except ValidationError:
        return None


class StatusWriter:
    """Server-side apply of the whole of our fields each time, so that nothing of ours goes stale.

    Args:
        before: the run's status as it was found: progress and weights stay as they were until
            they are reported again, and conditions keep their time.
        count: told ``written``, ``error`` or ``conflict``.
        answered: told the run as it was after a write.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        uid: str,
        before: Mapping[str, Any],
        count: Callable[[str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        answered: Callable[[Mapping[str, Any]], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._answered = answered
        self._uid = uid
        self._count = count
        self._now = now
        self._monotonic = monotonic
        self._kept = {key: before[key] for key in _KEPT if key in before}
        self._conditions = {c["type"]: dict(c) for c in before.get("conditions") or []}
        self._restarts: dict[str, Any] = dict(before.get("restartsInPlace") or {})
        self._restarts_of: int | None = before.get("attempt")
        self._last_committed = (before.get("checkpoint") or {}).get("lastCommitted")
        self._written: dict[str, Any] | None = None
        self._written_at = 0.0
        self._unknown: tuple[str, ...] = ()

    def render(self, view: CoreView) -> dict[str, Any]:
        """Our part of status for ``view``. Conditions move their time only on a flip."""
        status: dict[str, Any] = dict(self._kept)
        if view.progress is not None:
            status["progress"] = view.progress.to_json_dict()
        if (weights := self._weights(view)) is not None:
            status["weights"] = weights.to_json_dict()
        if view.at_risk is not None:
            status["atRisk"] = view.at_risk.to_json_dict()
        if view.account is not None:
            status["account"] = view.account.to_json_dict()
        if view.restarts.count:
            restarts = RestartsInPlace(
                count=view.restarts.count, time=view.restarts.time, reason=view.restarts.reason
            ).to_json_dict()
            # A monitor before this one may have seen it.
            is_same = (self._restarts_of, self._restarts.get("count")) == (
                view.attempt,
                view.restarts.count,
            )
            status["restartsInPlace"] = self._restarts | restarts if is_same else restarts
        for name in self._unknown:
            status.pop(name, None)
        checkpoint = view.checkpoint.to_json_dict()
        if self._last_committed is not None:
            # Gone from the volume, it stays in the status: that alone tells of it.
            checkpoint.setdefault("lastCommitted", self._last_committed)
        status["checkpoint"] = checkpoint
        status["conditions"] = [self._condition(condition) for condition in view.conditions]
        return status

    async def write(self, view: CoreView) -> bool:
        """Write if it differs from what was written last; whether it did.

        Raises:
            KubeError: not written.
            StaleRunError: the run is gone or has another uid.
        """
        status = self.render(view)
        if not self._is_news(status):
            return False
        try:
            applied = await self._apply(status)
        except KubeError as error:
            self._count("conflict" if error.status == 409 else "error")
            # Our fields are forced, so what is left to conflict is the uid.
            if error.status in (404, 409):
                raise StaleRunError(f"status not written: {error}") from error
            raise
        self._count("written")
        self._answered(applied)
        self._written, self._written_at = status, self._monotonic()
        self._kept = {key: status[key] for key in _KEPT if key in status}
        self._restarts, self._restarts_of = status.get("restartsInPlace", {}), view.attempt
        self._last_committed = status["checkpoint"].get("lastCommitted")
        self._conditions = {c["type"]: c for c in status["conditions"]}
        return True

    async def run(
        self,
        look: Callable[[], Awaitable[CoreView | None]],
        changed: Callable[[float], Awaitable[None]],
    ) -> None:
        """Write until cancelled; a failed write is tried again, less and less often.

        Args:
            look: the present view; None while there is nothing to say (no Lease).
            changed: returns when something may have changed, or after so many seconds.

        Raises:
            StaleRunError: end this monitor.
        """
        wait = SHORTEST_INTERVAL
        while True:
            started = time.monotonic()
            wrote = False
            try:
                view = await look()
                wrote = view is not None and await self.write(view)
                wait = SHORTEST_INTERVAL
            except KubeError as error:
                wait = min(wait * 2, _LONGEST_WAIT)
                _LOG.warning("status not written, again in %g s: %s", wait, error)
                await asyncio.sleep(wait)
                continue
            if wrote:
                await asyncio.sleep(max(SHORTEST_INTERVAL - (time.monotonic() - started), 0.0))
            else:
                await changed(SHORTEST_INTERVAL)

    async def _apply(self, status: dict[str, Any]) -> Mapping[str, Any]:
        """Apply it; without newer fields, from now on, where the CRD is older than they are."""
        while True:
            try:
                return await self._api.apply_status(self._uid, status)
            except KubeError as error:
                newer = [name for name in _NEWER if name in status and f".{name}:" in str(error)]
                if _NOT_IN_THE_CRD not in str(error) or not newer:
                    raise
                _LOG.warning("the CRD is older than this monitor, and the status lacks: %s", error)
            for name in newer:
                del status[name]
            self._unknown = (*self._unknown, *newer)

    def _is_news(self, status: Mapping[str, Any]) -> bool:
        """Whether to write it: the account grows with every second, and waits for other news."""
        if self._written is None or self._monotonic() - self._written_at >= _ACCOUNT_SECONDS:
            return status != self._written
        return {**status, "account": None} != {**self._written, "account": None}

    def _weights(self, view: CoreView) -> WeightsStatus | None:
        """The weights; explorers' stay as they were until the Synchronizer reports again."""
        kept = weights_in(self._kept) if view.weights is None and view.servers else None
        if kept is not None and kept.explorers:
            living = [e.lag for e in kept.explorers if e.state not in ABSENT_STATES]
            kept = kept.model_copy(update={"lag": max(living, default=0)})
        else:
            kept = None  # without explorers it tells of servers alone
        return with_servers(view.weights or kept, view.servers)

    def _condition(self, view: ConditionView) -> dict[str, Any]:
        last = self._conditions.get(view.type.value)
        flipped = last is None or last.get("status") != view.status.value
        since = format_time(self._now()) if flipped or last is None else last["lastTransitionTime"]
        return {
            "type": view.type.value,
            "status": view.status.value,
            "reason": view.reason,
            "message": view.message,
            "lastTransitionTime": since,
        }
