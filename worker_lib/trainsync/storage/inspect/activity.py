"""Whether a run seems to be at work on a directory; for sure the disk says it of local runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.hosting import has_ended
from trainsync.storage.inspect.findings import entries, relative, walk
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import scan

QUIET_SECONDS: Final = 900.0
"""A directory in which nothing changed for so long counts as left."""


def sign_of_life(run: RunDirectory, now: float) -> str | None:
    """A sentence about the newest change of the last `QUIET_SECONDS`; None when there is none.

    Args:
        now: seconds since 1970; the clocks of this host and of the volume are assumed to agree.

    Raises:
        OSError: the volume cannot be read.
    """
    if has_ended(run):
        return None
    newest = max(_changes(run), default=None)
    if newest is None or now - newest[0] >= QUIET_SECONDS:
        return None
    return f"{relative(run, newest[1])} was changed {max(now - newest[0], 0):.0f} s ago"


def steps_being_saved(run: RunDirectory) -> set[int]:
    """Steps of saves in staging that have not ended. Raises `OSError`."""
    return {
        save.step
        for owner in scan.owners(run)
        for save in scan.Scanner(run).saves(*owner)
        if save.outcome is None
    }


def _changes(run: RunDirectory) -> Iterator[tuple[float, Path]]:
    looked_at = [run.pointer(kind) for kind in SaveKind]
    looked_at += [run.step(step) for step in run.steps()]
    looked_at += [Path(entry.path) for entry in entries(run.claims)]
    looked_at += [Path(entry.path) for entry in walk(run.staging)]
    for path in looked_at:
        try:
            yield path.lstat().st_mtime, path
        except FileNotFoundError:
            continue
