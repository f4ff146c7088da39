"""Kubernetes Events that the monitor posts of its run: aborts, health, resumes, weights.

`trainsync.monitor.server.event_poster` posts them: nothing here waits for the API server.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from pydantic import ValidationError

from trainsync.api.protocol import LoadReport, SaveKind
from trainsync.api.status import (
    ConditionStatus,
    ConditionType,
    ExplorerStatus,
    MirrorStatus,
    RollbackState,
    RollbackStatus,
    ServerWeights,
)
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core import explorer_events
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey
from trainsync.monitor.server.status import weights_in
from trainsync.monitor.serving import changes as server_changes

WAITING_KEPT: Final = 64
"""Events that wait to be posted; of more, the oldest is dropped."""


class EventReason(StrEnum):
    """Reasons of the monitor's Events."""

    CHECKPOINT_ABORTED = "CheckpointAborted"
    STATE_DICT_ABORTED = "StateDictAborted"
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    STATE_DICT_DAMAGED = "StateDictDamaged"
    CHECKPOINT_UNHEALTHY = "CheckpointUnhealthy"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    RESTARTED_IN_PLACE = "RestartedInPlace"
    RESUMED = "ResumedFromCheckpoint"
    LOADED = "CheckpointLoaded"
    MIRROR_FAILED = "MirrorFailed"
    MIRROR_BACK = "MirrorBack"
    RESUME_FAILED = "ResumeFailed"
    EXPLORER_LOST = "ExplorerLost"
    EXPLORER_BACK = "ExplorerBack"
    WEIGHTS_REFUTED = "WeightsRefuted"
    WEIGHTS_PROVEN = "WeightsProven"
    ROLLBACK_ACCEPTED = "RollbackAccepted"
    ROLLBACK_REFUSED = "RollbackRefused"
    ROLLED_BACK = "RolledBack"


_NORMAL: Final = (
    EventReason.CHECKPOINT_HEALTHY,
    EventReason.RESUMED,
    EventReason.LOADED,
    EventReason.MIRROR_BACK,
    EventReason.EXPLORER_BACK,
    EventReason.WEIGHTS_PROVEN,
    EventReason.ROLLBACK_ACCEPTED,
    EventReason.ROLLED_BACK,
)
_ROLLBACK: Final = {
    RollbackState.ACCEPTED: EventReason.ROLLBACK_ACCEPTED,
    RollbackState.REFUSED: EventReason.ROLLBACK_REFUSED,
    RollbackState.DONE: EventReason.ROLLED_BACK,
}
_ABORTED: Final = {
    SaveKind.CHECKPOINT: EventReason.CHECKPOINT_ABORTED,
    SaveKind.STATE_DICT: EventReason.STATE_DICT_ABORTED,
}
_DAMAGED: Final = {
    SaveKind.CHECKPOINT: EventReason.CHECKPOINT_DAMAGED,
    SaveKind.STATE_DICT: EventReason.STATE_DICT_DAMAGED,
}


@dataclass(frozen=True)
class MonitorEvent:
    """Something that happened ``count`` times, the last time at ``time``."""

    time: datetime
    reason: EventReason
    message: str
    count: int = 1

    @property
    def warning(self) -> bool:
        """Whether its type is Warning."""
        return self.reason not in _NORMAL


class EventQueue(NullObserver):
    """Told by the core's thread, shown views by the event loop, emptied by a poster.

    What happens again while it waits is counted, not queued again.

    Args:
        wake: called after an Event was added; returns at once.
        dropped: called for each Event that was dropped.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        *,
        wake: Callable[[], None] = lambda: None,
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._wake = wake
        self._dropped = dropped
        self._lock = threading.Lock()
        self._waiting: deque[MonitorEvent] = deque()
        self._healthy = ConditionStatus.UNKNOWN.value
        self._explorers: Mapping[str, ExplorerStatus] = {}
        self._servers: Mapping[str, ServerWeights] = {}
        self._resume: tuple[int, int | str] | None = None
        self._rollback: RollbackStatus | None = None
        self._mirror_error: str | None = None

    def begin(self, status: Mapping[str, Any]) -> None:
        """The run's status as the monitor before left it: what it told is not told again."""
        for condition in status.get("conditions") or []:
            if condition["type"] == ConditionType.CHECKPOINT_HEALTHY.value:
                self._healthy = condition["status"]
        asked = (status.get("checkpoint") or {}).get("rollback")
        with suppress(ValidationError):  # another version's
            self._rollback = RollbackStatus.model_validate(asked, extra="ignore") if asked else None
        if (weights := weights_in(status)) is not None:
            self._explorers = {e.id: e for e in weights.explorers}
            self._servers = {server.name: server for server in weights.servers}

    def take(self) -> MonitorEvent | None:
        """The oldest that waits, which waits no more."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def see(self, view: CoreView) -> None:
        """Tell how health and explorers differ from the view before. For one thread."""
        for condition in view.conditions:
            if condition.type is ConditionType.CHECKPOINT_HEALTHY:
                self._see_health(condition.status, condition.message)
        rollback, before = view.checkpoint.rollback, self._rollback
        self._rollback = rollback
        if rollback is not None and rollback != before:
            self._add(_ROLLBACK[rollback.state], rollback.message)
        self._see_mirror(view.checkpoint.mirror)
        if view.servers is not None:
            self._see_servers(view.servers.shown)
        if view.weights is None:
            return  # no report has come since this monitor began
        now = {e.id: e for e in view.weights.explorers}
        changes = explorer_events.between(self._explorers, now)
        self._explorers = now
        if changes.lost is not None:
            self._add(EventReason.EXPLORER_LOST, changes.lost)
        if changes.back is not None:
            self._add(EventReason.EXPLORER_BACK, changes.back)

    def aborted(self, key: SaveKey, cause: AbortCause) -> None:
        """See `Observer`. A skipped save is no failure, nor is one of trainers that were restarted:
        metrics alone tell."""
        if cause.reason not in (AbortReason.SKIPPED, AbortReason.RESTARTED):
            self._add(_ABORTED[key.kind], f"{key}: {cause.message}")

    def damaged(self, kind: SaveKind, message: str) -> None:
        """See `Observer`."""
        self._add(_DAMAGED[kind], message)

    def restarted(self, attempt: int, number: int, reason: str) -> None:
        """See `Observer`."""
        text = f"attempt {attempt} is restarted in its pods ({number}): {reason}"
        self._add(EventReason.RESTARTED_IN_PLACE, text)

    def resumed(self, attempt: int, step: int) -> None:
        """See `Observer`. Every rank asks; it is told once."""
        if self._is_news(attempt, step):
            self._add(EventReason.RESUMED, f"attempt {attempt} resumes from checkpoint {step}")

    def loaded(self, attempt: int, report: LoadReport) -> None:
        """See `Observer`."""
        memory, volume = report.memory_bytes / 1e9, report.volume_bytes / 1e9
        fetched = (report.neighbour_bytes or 0) / 1e9
        of_others = f" ({fetched:.3g} GB of that from another pod's)" if fetched else ""
        self._add(
            EventReason.LOADED,
            f"attempt {attempt} loaded step {report.step} in {report.seconds:.1f} s: {memory:.3g} "
            f"GB from memory{of_others}, {volume:.3g} GB from storage",
        )

    def resume_failed(self, attempt: int, message: str) -> None:
        """See `Observer`. Every rank asks, and asks again; it is told once."""
        if self._is_news(attempt, message):
            self._add(EventReason.RESUME_FAILED, f"attempt {attempt} cannot resume: {message}")

    def _see_mirror(self, mirror: MirrorStatus | None) -> None:
        error, before = (None if mirror is None else mirror.error), self._mirror_error
        self._mirror_error = error
        if error is not None and before is None:
            self._add(EventReason.MIRROR_FAILED, error)
        elif error is None and before is not None and mirror is not None:
            self._add(EventReason.MIRROR_BACK, f"steps are copied to {mirror.url} again")

    def _see_servers(self, shown: Iterable[ServerWeights]) -> None:
        now = {server.name: server for server in shown}
        changes = server_changes.between(self._servers, now)
        self._servers = now
        if changes.refuted is not None:
            self._add(EventReason.WEIGHTS_REFUTED, changes.refuted)
        if changes.proven is not None:
            self._add(EventReason.WEIGHTS_PROVEN, changes.proven)

    def _is_news(self, attempt: int, what: int | str) -> bool:
        before, self._resume = self._resume, (attempt, what)
        return self._resume != before

    def _see_health(self, status: ConditionStatus, message: str) -> None:
        before, self._healthy = self._healthy, status.value
        if status.value == before:
            return
        if status is ConditionStatus.FALSE:
            self._add(EventReason.CHECKPOINT_UNHEALTHY, message)
        elif status is ConditionStatus.TRUE:
            self._add(EventReason.CHECKPOINT_HEALTHY, message)

    def _add(self, reason: EventReason, message: str) -> None:
        event = MonitorEvent(self._clock(), reason, message)
        with self._lock:
            for place, other in enumerate(self._waiting):
                if (other.reason, other.message) == (reason, message):
                    again = replace(event, count=other.count + 1)
                    del self._waiting[place]
                    self._waiting.append(again)
                    break
            else:
                self._waiting.append(event)
            too_many = len(self._waiting) > WAITING_KEPT
            if too_many:
                self._waiting.popleft()
        if too_many:
            self._dropped()
        self._wake()
