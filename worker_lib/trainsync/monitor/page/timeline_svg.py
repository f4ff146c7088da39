"""The timeline: attempts, saves and faults over time, as an SVG that fits any width. Pure.

Places are percentages, so that nothing has to be scaled and text keeps its size. Marks that would
fall on each other are drawn as one: a run with thousands of saves is as small as any.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

from trainsync.api import words
from trainsync.api.page import AttemptStart, NewsKind, RunPage, SavePoint
from trainsync.api.protocol import SaveKind
from trainsync.monitor.page.html import text

_COLUMNS: Final = 160
_ATTEMPTS_DRAWN: Final = 60
_LANES: Final = {"attempts": 26, "checkpoints": 62, "state dicts": 92, "faults": 122}
_HEIGHT: Final = 152
Place = Callable[[datetime], float]


def timeline(page: RunPage) -> str:
    """The drawing, or a sentence where nothing has happened yet."""
    times = [*(a.time for a in page.attempts), *(s.time for s in page.saves)]
    times += [n.time for n in page.news]
    if page.start_time is not None:
        times.append(page.start_time)
    if not times:
        return '<p class="quiet">Nothing has happened yet.</p>'
    begin = min(times)
    end = max(page.completion_time or page.time, *times)
    span = max((end - begin).total_seconds(), 1.0)

    def place(time: datetime) -> float:
        # A little inside, so that marks at the ends are whole.
        return 1 + 98 * (time - begin).total_seconds() / span

    parts = [
        *_attempts(page.attempts, place, end),
        *_saves(page.saves, SaveKind.CHECKPOINT, "checkpoints", place),
        *_saves(page.saves, SaveKind.STATE_DICT, "state dicts", place),
        *_faults(page, place),
        *(f'<text class="lane" x="1%" y="{y - 11}">{lane}</text>' for lane, y in _LANES.items()),
        f'<text class="tick" x="1%" y="{_HEIGHT - 4}">{words.clock(begin)}</text>',
        f'<text class="tick end" x="99%" y="{_HEIGHT - 4}">{words.clock(end)} UTC</text>',
    ]
    label = "Attempts, saves and faults over time; the lists on this page say the same in words"
    return (
        f'<svg class="timeline" role="img" aria-label="{label}" width="100%" height="{_HEIGHT}">'
        f"{''.join(parts)}</svg>"
    )


def _attempts(attempts: list[AttemptStart], place: Place, end: datetime) -> Iterable[str]:
    first: dict[int, datetime] = {}
    for start in attempts:
        first[start.attempt] = min(start.time, first.get(start.attempt, start.time))
    shown = sorted(first.items())[-_ATTEMPTS_DRAWN:]
    ends = [*(time for _, time in shown), end][1:]
    y = _LANES["attempts"]
    for (attempt, time), until in zip(shown, ends, strict=True):
        left, width = place(time), max(place(until) - place(time), 0.3)
        kind = "even" if attempt % 2 == 0 else "odd"
        label = f"attempt {attempt}, from {words.clock(time)} UTC"
        yield (
            f'<g><title>{label}</title><rect class="attempt {kind}" x="{left:.2f}%" y="{y - 6}" '
            f'width="{width:.2f}%" height="14" rx="3"/></g>'
        )
        if width > 4:
            yield f'<text class="on" x="{left + width / 2:.2f}%" y="{y + 5}">{attempt}</text>'


def _saves(saves: list[SavePoint], kind: SaveKind, lane: str, place: Place) -> Iterable[str]:
    columns: dict[int, list[SavePoint]] = {}
    for save in saves:
        if save.kind is kind:
            columns.setdefault(int(place(save.time) * _COLUMNS / 100), []).append(save)
    y, word = _LANES[lane], kind.value.replace("_", " ")
    for together in columns.values():
        last = together[-1]
        label = f"{word} {last.step}, {words.clock(last.time)} UTC"
        if len(together) > 1:
            steps = [save.step for save in together]
            label = f"{len(together)} {word}s, steps {min(steps)} to {max(steps)}"
        yield (
            f'<g><title>{label}</title><circle class="save {kind.value}" '
            f'cx="{place(last.time):.2f}%" cy="{y}" r="4.5"/></g>'
        )


def _faults(page: RunPage, place: Place) -> Iterable[str]:
    y = _LANES["faults"]
    for news in page.news:
        if news.kind is NewsKind.FAULT:
            yield (
                f'<svg x="{place(news.time):.2f}%" y="{y}" class="at"><title>{text(news.text)}'
                '</title><path class="fault" d="M0 -6 L6 5 L-6 5 Z"/></svg>'
            )
