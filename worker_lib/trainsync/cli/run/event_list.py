"""Kubernetes Events of a run and its children, in order. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainsync.api import names
from trainsync.api.base import format_time
from trainsync.cli.run.owners import belongs
from trainsync.cli.run.report import RunReport

Object = dict[str, Any]


@dataclass(frozen=True, order=True)
class ClusterEvent:
    """One Event; the same one again only raises ``count`` and ``time``."""

    time: datetime
    kind: str
    name: str
    reason: str
    message: str
    warning: bool
    count: int

    def to_json_dict(self) -> Object:
        """For ``--json``."""
        return {
            "time": format_time(self.time),
            "type": "Warning" if self.warning else "Normal",
            "kind": self.kind,
            "name": self.name,
            "reason": self.reason,
            "message": self.message,
            "count": self.count,
        }


def of_run(events: list[Object], run: RunReport, others: Collection[str]) -> list[ClusterEvent]:
    """Those of ``events`` that are about ``run`` or what was made for it, oldest first.

    An older run of the same name is told apart by its uid, and its children by their time.
    """
    found = [_read(event) for event in events if _about(event, run, others)]
    return sorted(event for event in found if event.time >= run.created)


def _about(event: Object, run: RunReport, others: Collection[str]) -> bool:
    about = event.get("involvedObject") or {}
    if about.get("kind") == names.KIND:
        return bool(about.get("uid") == run.uid)
    return belongs(run.name, run.cluster_names, others, str(about.get("name") or ""))


def _read(event: Object) -> ClusterEvent:
    about = event.get("involvedObject") or {}
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return ClusterEvent(
        time=datetime.fromisoformat(next(time for time in times if time)),
        kind=str(about.get("kind") or ""),
        name=str(about.get("name") or ""),
        reason=str(event.get("reason") or ""),
        message=str(event.get("message") or ""),
        warning=event.get("type") == "Warning",
        count=int(series.get("count") or event.get("count") or 1),
    )
