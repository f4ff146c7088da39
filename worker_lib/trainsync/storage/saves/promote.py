"""Promotion: finished files move from staging into ``global_step_N/`` by rename.

Idempotent: whenever it was interrupted it is done again, since a file is either still in staging or
already in place. One that is in neither went with the machine, and the save is not committed.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic
from trainsync.storage.errors import (
    DamagedFileError,
    FileCheckError,
    PromotionConflictError,
    UnsafePathError,
)
from trainsync.storage.layout import (
    RunDirectory,
    SaveDirectory,
    check_not_reserved,
    inside,
    look_inside,
    own_name,
)
from trainsync.storage.saves import superseding
from trainsync.storage.saves.manifest import check_file, read_manifest
from trainsync.storage.saves.receipts import FileEntry

_NOBODY: Mapping[str, str | None] = {}


def locate(
    run: RunDirectory,
    save: SaveDirectory,
    step: int,
    entry: FileEntry,
    writer: str | None = None,
) -> Path:
    """The directory that ``entry`` of ``writer`` is now below: its own in staging, aside, or the
    step's.

    What is not in staging need not be promoted: names there are not durable, and at the step may
    lie what an older save left. Only its digest says that it is the save's.

    Raises:
        UnsafePathError: the path leaves staging, goes through a symbolic link, or is reserved.
    """
    check_not_reserved(entry.path)
    if look_inside(save.files, _staged(entry, writer))[1] is not None:
        return save.files_of(writer)
    aside = superseding.aside(run, save)
    if look_inside(aside, entry.path)[1] is not None:
        return aside
    return run.step(step)


def check_conflicts(
    run: RunDirectory, kind: SaveKind, step: int, files: Sequence[FileEntry]
) -> None:
    """See that no file of another committed kind at ``step`` would be replaced by other bytes.

    Raises:
        PromotionConflictError: names the file.
        DamagedFileError: the other manifest cannot be read.
    """
    for other in SaveKind:
        if other is kind:
            continue
        try:
            listed = {e.path: e for e in read_manifest(run, other, step).manifest.files}
        except FileNotFoundError:
            continue
        for entry in files:
            if entry.path in listed and listed[entry.path] != entry:
                raise PromotionConflictError(
                    f"{entry.path} at step {step} is committed by the {other} with other content"
                )


def promote(
    run: RunDirectory,
    save: SaveDirectory,
    step: int,
    files: Sequence[FileEntry],
    before_each: Callable[[], None] = lambda: None,
    target: Path | None = None,
    writers: Mapping[str, str | None] = _NOBODY,
) -> None:
    """Rename every file into place and make the renames durable.

    ``before_each`` runs before every rename; what it raises stops the promotion there. ``target``
    is the step's directory, unless the save will take a committed one's place. ``writers`` says
    whose the file of a path is; see `SaveDirectory.files_of`.

    Raises:
        FileCheckError: a file is neither in staging nor, with its size, in place.
        UnsafePathError: a path leaves its directory.
        OSError: do it again later.
    """
    target = run.step(step) if target is None else target
    touched: set[str] = set()
    for entry in files:
        source, staged = look_inside(save.files, _staged(entry, writers.get(entry.path)))
        destination, placed = look_inside(target, entry.path)
        parent = destination.rpartition("/")[0]
        before_each()
        if staged is not None:
            if parent not in touched:
                atomic.make_directory(Path(parent))
            os.replace(source, destination)  # noqa: PTH105 - thousands of strings, not paths
        elif placed is None:
            raise FileCheckError(f"{entry.path} is neither in {save.files} nor in {target}")
        else:
            check_file(target, entry, with_digest=False)
        touched.add(parent)
    # Not where they came from: a name that a crash brings back in staging is renamed once more, or
    # goes with the staging of what is committed.
    for directory in touched:
        atomic.fsync_directory(Path(directory))


def undo(run: RunDirectory, step: int, files: Sequence[FileEntry]) -> None:
    """Remove promoted files of a save that will not commit, unless a manifest lists them."""
    target = run.step(step)
    listed: set[str] = set()
    for kind in SaveKind:
        try:
            listed |= {entry.path for entry in read_manifest(run, kind, step).manifest.files}
        except FileNotFoundError:
            continue
        except DamagedFileError:
            return  # it may list any of them; an orphan costs less than another save's file
    for entry in files:
        if entry.path in listed:
            continue
        try:
            path = inside(target, entry.path)
        except UnsafePathError:
            continue  # it was refused, so it was never promoted
        path.unlink(missing_ok=True)
        for parent in path.relative_to(run.root).parents:
            directory = run.root / parent
            if directory == run.root or not _remove_if_empty(directory):
                break


def _staged(entry: FileEntry, writer: str | None) -> str:
    return entry.path if writer is None else f"{own_name(writer)}/{entry.path}"


def _remove_if_empty(directory: Path) -> bool:
    """Whether it is gone."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True  # the promotion stopped before it came to this one
    except OSError:
        return False  # not empty
    return True
