"""Which steps go, and how: the choice is pure, the deletion renames first.

A step's directory is renamed into ``.trainsync/trash`` before anything in it is removed, so that
its manifest vanishes in one step and a half-deleted checkpoint is never seen.
"""

import secrets
import shutil
from collections.abc import Iterable, Set
from pathlib import Path

from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory


def choose_removals(
    checkpoints: Iterable[int],
    state_dicts: Iterable[int],
    keep: int | None,
    protected: Set[int],
) -> list[int]:
    """Steps to remove, oldest first.

    Of each kind the newest ``keep`` (all when None) stay, and so does every step in
    ``protected`` (the last committed, the pointers' targets, the resume target). A step's
    directory is kept when either kind keeps it.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"max_to_keep is {keep}, expected at least 1")
    first, second = sorted(set(checkpoints)), sorted(set(state_dicts))
    kept = set(first[-keep:]) | set(second[-keep:]) | protected
    return sorted((set(first) | set(second)) - kept)


def discard(run: RunDirectory, path: Path) -> None:
    """Rename ``path`` (in the run's directory) into the trash; `empty_trash` removes it.

    A path that is not there is fine. Raises `OSError`.
    """
    atomic.make_directory(run.trash)
    try:
        path.rename(run.trash / f"{path.name}.{secrets.token_hex(4)}")
    except FileNotFoundError:
        return
    atomic.fsync_directory(path.parent)


def remove_step(run: RunDirectory, step: int) -> None:
    """Remove a step's directory: it is uncommitted at once, its bytes go with `empty_trash`."""
    discard(run, run.step(step))


def empty_trash(run: RunDirectory) -> None:
    """Delete what was discarded, from before a crash too. Raises `OSError`."""
    try:
        entries = list(run.trash.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove_temporaries(directory: Path) -> None:
    """Remove temporary files that a killed writer left directly in ``directory``."""
    for entry in directory.iterdir():
        if atomic.is_temporary(entry.name) and not entry.is_symlink():
            if entry.is_dir():
                entry.rmdir()
            else:
                entry.unlink(missing_ok=True)
