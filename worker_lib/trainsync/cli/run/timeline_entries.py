"""Attempts, commits, faults and restarts of a run in one order, from several witnesses. Pure.

Events (kept for an hour) tell what the operator did, the run's status where it stands, its monitor
what was claimed, committed and went wrong. Each may be missing; what two tell counts once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from trainsync.api import names
from trainsync.api.base import format_time
from trainsync.api.page import News, NewsKind, RunPage
from trainsync.api.protocol import SaveKind
from trainsync.cli.run.event_list import ClusterEvent
from trainsync.cli.run.report import RunReport


class EntryKind(StrEnum):
    """The kind of an entry."""

    ATTEMPT = "attempt"
    COMMIT = "commit"
    FAULT = "fault"
    RESTART = "restart"
    STATE = "state"


# Reasons of the operator's Events that are no plain change of state.
_RESTARTS = ("Restarting",)
_STARTS = ("JobCreated",)
# The monitor's Events and the news on its page are made one right after the other.
_SAME = timedelta(seconds=10)
_EARLY_PROBES = ("Startup probe", "Readiness probe")


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """One thing that happened. ``step`` and ``save`` are of a commit."""

    time: datetime
    what: EntryKind
    text: str
    attempt: int | None = None
    save: str | None = None
    step: int | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        document: dict[str, Any] = {
            "time": format_time(self.time),
            "what": self.what.value,
            "text": self.text,
            "attempt": self.attempt,
            "save": self.save,
            "step": self.step,
        }
        return {key: value for key, value in document.items() if value is not None}


def tell(
    run: RunReport, events: Iterable[ClusterEvent], page: RunPage | None
) -> list[TimelineEntry]:
    """Everything that is known, oldest first."""
    events = list(events)
    entries = [*_of_events(events), *_of_status(run)]
    if page is not None:
        entries += _of_page(page, [event for event in events if event.kind == names.KIND])
    kept: dict[tuple[object, ...], TimelineEntry] = {}
    # Events first: of two entries about one change, the operator's is kept.
    for entry in entries:
        kept.setdefault(_identity(entry), entry)
    return sorted(kept.values())


def gathered(entries: Sequence[TimelineEntry]) -> list[tuple[TimelineEntry, str]]:
    """Each entry with what to say; commits with nothing between them are told together."""
    told: list[tuple[TimelineEntry, str]] = []
    together: list[TimelineEntry] = []

    def flush() -> None:
        for save in dict.fromkeys(entry.save for entry in together):
            alike = [entry for entry in together if entry.save == save]
            told.append((alike[-1], _together(alike)))
        together.clear()

    for entry in entries:
        if entry.what is EntryKind.COMMIT:
            together.append(entry)
        else:
            flush()
            told.append((entry, entry.text))
    flush()
    return told


def strip(entries: Sequence[TimelineEntry], end: datetime, width: int) -> list[tuple[str, str]]:
    """Lanes of ``width`` characters from the first entry to ``end``: their names, and they."""
    if not entries:
        return []
    begin = entries[0].time
    span = max((end - begin).total_seconds(), 1.0)

    def place(time: datetime) -> int:
        return min(max(int((time - begin).total_seconds() / span * width), 0), width - 1)

    attempts, commits, faults = [" "] * width, [" "] * width, [" "] * width
    starts = [e for e in entries if e.what is EntryKind.ATTEMPT and e.attempt is not None]
    for entry in starts:
        for column in range(place(entry.time), width):
            attempts[column] = str((entry.attempt or 0) % 10)
    for entry in entries:
        if entry.what is EntryKind.COMMIT and entry.save == SaveKind.CHECKPOINT.value:
            commits[place(entry.time)] = "●"
        elif entry.what in (EntryKind.FAULT, EntryKind.RESTART):
            faults[place(entry.time)] = "✗"
    lanes = (("attempt", attempts), ("checkpoints", commits), ("faults", faults))
    return [(name, "".join(lane)) for name, lane in lanes]


def _of_events(events: Iterable[ClusterEvent]) -> Iterable[TimelineEntry]:
    for event in events:
        if event.kind != names.KIND:
            if event.warning and not _starts_up(event):
                text = f"{event.kind} {event.name}: {event.reason}: {event.message}"
                yield TimelineEntry(event.time, EntryKind.FAULT, text)
        elif event.reason in _RESTARTS:
            yield TimelineEntry(event.time, EntryKind.RESTART, event.message)
        elif event.reason in _STARTS:
            yield TimelineEntry(
                event.time, EntryKind.ATTEMPT, event.message, _attempt(event.message)
            )
        else:
            what = EntryKind.FAULT if event.warning else EntryKind.STATE
            yield TimelineEntry(event.time, what, f"{event.reason}: {event.message}")


def _starts_up(event: ClusterEvent) -> bool:
    """Whether a probe asked a pod too early, as happens at every start."""
    return event.reason == "Unhealthy" and event.message.startswith(_EARLY_PROBES)


def _attempt(message: str) -> int | None:
    """The number at the end of "RayJob … was made for attempt 3."."""
    word = message.rstrip(".").rpartition(" ")[2]
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 9 else None


def _of_status(run: RunReport) -> Iterable[TimelineEntry]:
    status = run.status
    checkpoint = status.checkpoint
    saved = (
        (SaveKind.CHECKPOINT, checkpoint.last_committed if checkpoint else None),
        (SaveKind.STATE_DICT, checkpoint.last_state_dict if checkpoint else None),
    )
    for kind, save in saved:
        if save is not None:
            yield _commit(save.time, kind, save.step)
    for condition in run.problems():
        if condition.status.value == "False" and not run.ended:
            text = f"{condition.type.value} became False: {condition.message}"
            yield TimelineEntry(condition.last_transition_time, EntryKind.FAULT, text)
    if status.start_time is not None:
        yield TimelineEntry(status.start_time, EntryKind.STATE, "The run began.")
    if status.completion_time is not None:
        what = EntryKind.FAULT if run.failed else EntryKind.STATE
        yield TimelineEntry(status.completion_time, what, f"The run ended: {run.phase}.")


def _of_page(page: RunPage, events: Sequence[ClusterEvent]) -> Iterable[TimelineEntry]:
    for start in page.attempts:
        text = f"Attempt {start.attempt} was claimed by the job on cluster {start.cluster}."
        yield TimelineEntry(start.time, EntryKind.ATTEMPT, text, start.attempt)
    for save in page.saves:
        yield _commit(save.time, save.kind, save.step, save.attempt)
    for news in page.news:
        if any(_tells(event, news) for event in events):
            continue  # the monitor posted it
        times = f" ({news.count} times)" if news.count > 1 else ""
        what = EntryKind.FAULT if news.kind is NewsKind.FAULT else EntryKind.STATE
        yield TimelineEntry(news.time, what, news.text + times)


def _tells(event: ClusterEvent, news: News) -> bool:
    return event.message == news.text and abs(event.time - news.time) <= _SAME


def _commit(time: datetime, kind: SaveKind, step: int, attempt: int | None = None) -> TimelineEntry:
    words = kind.value.replace("_", " ")
    return TimelineEntry(
        time, EntryKind.COMMIT, f"{words} {step} was committed.", attempt, kind.value, step
    )


def _identity(entry: TimelineEntry) -> tuple[object, ...]:
    if entry.what is EntryKind.COMMIT:
        return (entry.what, entry.save, entry.step, format_time(entry.time))
    return (entry.what, entry.text, entry.time)


def _together(alike: Sequence[TimelineEntry]) -> str:
    if len(alike) == 1:
        return alike[0].text
    steps = [entry.step for entry in alike if entry.step is not None]
    words = str(alike[0].save).replace("_", " ")
    return f"{len(alike)} {words}s were committed, of steps {min(steps)} to {max(steps)}."
