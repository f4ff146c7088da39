"""Temporary files that a killed monitor left.

Only names of what monitors alone write: those of pointers, claims, the resume target and manifests.
A participant's, a reader's and a merge's are theirs, and may be written at this moment.
"""

import logging
import os
import stat
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage.atomic import temporary_of
from trainsync.storage.layout import POINTERS, RunDirectory, manifest_name, parse_step
from trainsync.storage.saves import scan, superseding

_LOG = logging.getLogger(__name__)
_MANIFESTS = frozenset(manifest_name(kind) for kind in SaveKind)


def remove_monitors(run: RunDirectory, gate: Callable[[], None] = lambda: None) -> list[Path]:
    """Remove what earlier monitors of the run left; for the one that works now.

    What cannot be removed is logged: it keeps a little space, and breaks nothing.

    Args:
        gate: called before each removal; its exception prevents that.

    Returns what is gone.

    Raises:
        OSError: a directory cannot be read.
    """
    removed = []
    for path in sorted(set(_monitors(run))):
        gate()
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s, which a killed monitor left, cannot be removed: %s", path, error)
        else:
            removed.append(path)
    return removed


def _monitors(run: RunDirectory) -> Iterator[Path]:
    yield from _temporaries(run.root, POINTERS.values())
    records = (run.resume_target, run.rollback, run.account)
    yield from _temporaries(run.resume_target.parent, {record.name for record in records})
    yield from _temporaries(run.claims)
    # The staging of a save is there until its manifest is, so these are all that may have one.
    for attempt, incarnation in scan.owners(run):
        for kind in SaveKind:
            for name, _ in _entries(run.owner(attempt, incarnation) / kind.value):
                if (step := parse_step(name)) is not None:
                    save = run.save(attempt, incarnation, kind, step)
                    for directory in (run.step(step), *superseding.leftovers(run, save)):
                        yield from _temporaries(directory, _MANIFESTS)


def _temporaries(directory: Path, of: Container[str] | None = None) -> Iterator[Path]:
    """Regular files in ``directory`` that were to become one of ``of`` (None: anything)."""
    for name, is_file in _entries(directory):
        target = temporary_of(name)
        if is_file and target is not None and (of is None or target in of):
            yield directory / name


def _entries(directory: Path) -> list[tuple[str, bool]]:
    """Names, and whether each is a regular file; none of a link, or where there is nothing."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return []
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_file(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []
