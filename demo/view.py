"""Shows the run's progress: a live table on a terminal, one line for each change elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.snapshot import Snapshot

COLUMNS = ("time", "phase", "attempt", "step", "reward", "committed", "weights", "lag")
_ROWS = 18


class View:
    """Prints snapshots and messages; a context manager for the duration of a run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self._last: tuple[str, ...] = ()
        self._message = ""
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live:
            self._live.__enter__()
        else:
            self._line(COLUMNS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def say(self, sentence: str) -> None:
        """Print a sentence that stays on the screen."""
        text = Text(f"[{self._seconds()}] {sentence}", style="bold")
        self._console.print(text, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Add a row if a cell has changed."""
        cells = cells_of(snapshot)
        if cells == self._last:
            return
        self._last = cells
        row = (self._seconds(), *cells)
        if self._live is None:
            self._line(row)
            return
        self._rows.append(row)
        table = Table(*COLUMNS, title="TrainingRun")
        for cells in self._rows:
            table.add_row(*cells)
        self._live.update(Group(table, Text(snapshot.message, style="dim")), refresh=True)

    def _line(self, cells: tuple[str, ...]) -> None:
        self._console.print(" ".join(f"{cell:>10}" for cell in cells), soft_wrap=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:5.1f} s"


def cells_of(snapshot: Snapshot) -> tuple[str, ...]:
    """The row of a snapshot, without its time."""

    def text(value: object) -> str:
        return "-" if value is None else str(value)

    reward = snapshot.metrics.get("reward")
    total = "" if snapshot.total is None else f"/{snapshot.total}"
    return (
        snapshot.phase,
        str(snapshot.attempt),
        f"{text(snapshot.step)}{total}",
        "-" if reward is None else f"{reward:.3f}",
        text(snapshot.committed),
        text(snapshot.version),
        text(snapshot.lag),
    )
