"""Which steps go, and how: the choice is pure, the deletion renames first.

A step's directory is renamed into ``.trainsync/trash`` before anything in it is removed, so that
its manifest vanishes in one step and a half-deleted checkpoint is never seen.
"""

import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

from trainsync.storage import atomic
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import RunDirectory


def choose_removals(
    checkpoints: Iterable[int],
    state_dicts: Iterable[int],
    keep: int | None,
    protected: Set[int],
    *,
    bad_checkpoints: Set[int] = frozenset(),
    bad_state_dicts: Set[int] = frozenset(),
) -> list[int]:
    """Steps to remove, oldest first.

    Of each kind the last ``keep`` (all when None) stay, and so does every step in ``protected``
    (the last committed, the pointers' targets, the resume target). A step's directory is kept when
    either kind keeps it.

    Args:
        checkpoints, state_dicts: in the order in which they were trained: after a resume that is
            not the order of their numbers.
        bad_checkpoints, bad_state_dicts: those of them that are known to be damaged. They take no
            place of a whole one; damaged saves as new as those that stay are not removed.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"max_to_keep is {keep}, expected at least 1")
    first, second = list(checkpoints), list(state_dicts)
    kept = _last(first, keep, bad_checkpoints) | _last(second, keep, bad_state_dicts) | protected
    return sorted((set(first) | set(second)) - kept)


def _last(steps: list[int], keep: int, bad: Set[int]) -> set[int]:
    whole = [place for place, step in enumerate(steps) if step not in bad]
    return set(steps[whole[-keep] :]) if len(whole) >= keep else set(steps)


def discard(run: RunDirectory, path: Path, *, durably: bool = True) -> Path | None:
    """Rename ``path`` (in the run's directory) into the trash; `empty_trash` removes it.

    Args:
        durably: False for what may come back after a crash, whole or in part.

    Returns where it is now; None when it was not there, which is fine. Raises `OSError`.
    """
    atomic.make_directory(run.trash)
    place = run.trash / f"{path.name}.{secrets.token_hex(4)}"
    try:
        path.rename(place)
    except FileNotFoundError:
        return None
    if durably:
        atomic.fsync_directory(path.parent)
    return place


def remove_step(run: RunDirectory, step: int) -> Path | None:
    """Remove a step's directory: it is uncommitted at once, its bytes go with `empty_trash`."""
    return discard(run, run.step(step))


def restore_step(run: RunDirectory, step: int, place: Path) -> None:
    """Undo `remove_step`, before `empty_trash`. Raises `OSError`."""
    place.rename(run.step(step))
    atomic.fsync_directory(run.root)


def remove_unleased(run: RunDirectory, step: int, leased: Callable[[], Set[int]]) -> bool:
    """Remove a step unless a reader has leased it; whether it is gone.

    To be called under the lock of `trainsync.storage.leases`. On a volume where that lock does not
    work, a lease may come between the look and the rename: then the step is put back.
    """
    if step in leased():
        return False
    place = remove_step(run, step)
    if place is not None and step in leased():
        restore_step(run, step, place)
        return False
    return True


def trash(run: RunDirectory) -> list[Path]:
    """Entries that were discarded and not deleted yet, from before a crash too.

    Raises:
        OSError: it cannot be read.
        UnsafePathError: it is a symbolic link, or something else that is not a directory.
    """
    try:
        if not stat.S_ISDIR(run.trash.lstat().st_mode):
            raise UnsafePathError(f"{run.trash} is not a directory (symbolic links are refused)")
        return list(run.trash.iterdir())
    except FileNotFoundError:
        return []


def delete(entries: Iterable[Path]) -> None:
    """Delete what `trash` listed; what is gone already is fine.

    Raises:
        OSError: the first that came, with the whole path; all else is deleted nevertheless.
    """
    failure: OSError | None = None

    def keep(_: Callable[..., Any], path: str, raised: Any) -> None:
        nonlocal failure
        error = raised[1]
        if not isinstance(error, FileNotFoundError):
            failure = failure or OSError(error.errno, error.strerror, path)

    for entry in entries:
        try:
            if stat.S_ISDIR(entry.lstat().st_mode):
                shutil.rmtree(entry, onerror=keep)
            else:
                entry.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def empty_trash(run: RunDirectory) -> None:
    """Delete what was discarded. Raises `OSError`."""
    delete(trash(run))
