"""A progress bar in bytes, on stderr, and nothing where stderr is no terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from trainsync.cli.output.console import stderr


class ProgressCallback(Protocol):
    """The bar of `bytes_bar`; several threads may call it."""

    def __call__(self, more: int, total: int | None = None) -> None:
        """So many more bytes are done, of ``total`` where that is known only now."""
        ...


@contextmanager
def bytes_bar(what: str, total: int | None) -> Iterator[ProgressCallback]:
    """A bar that is there while the body works."""
    console = stderr()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total)

        def tell(more: int, total: int | None = None) -> None:
            bar.update(task, advance=more, total=total)

        yield tell
