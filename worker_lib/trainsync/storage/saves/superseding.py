"""A newer attempt's state dict takes the place of an older attempt's at the same step.

So it is after a resume from a checkpoint that is older than the last state dict: the steps between
are trained again, with other weights. The new save is put together aside, manifest and all, and
then changes places with the step's directory in one rename: at every moment one of the two is there
as a whole, and a pointer at the step never dangles. The pointer does not go back: until training
has passed its step, it names weights of the older attempt. A reader that wants those of the attempt
in force compares ``manifest.attempt``.

A file system that cannot exchange two directories (some network ones) needs two renames. A crash
between them is finished by `finish`, before pointers are looked at.
"""

import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import (
    RunDirectory,
    SaveDirectory,
    is_reserved,
    manifest_name,
    parse_owner,
    parse_step,
    relative_parts,
)
from trainsync.storage.saves.manifest import Manifest, decode_manifest

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_UNSUPPORTED: Final = frozenset(
    {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM}
)
_OLD: Final = ".old"


def aside(run: RunDirectory, save: SaveDirectory) -> Path:
    """The directory of a save that will take a committed one's place."""
    return run.superseding / "-".join(save.path.parts[-3:])


def leftovers(run: RunDirectory, save: SaveDirectory) -> tuple[Path, Path]:
    """The two directories beside its place where the save, or the replaced one, may lie."""
    place = aside(run, save)
    return place, place.with_name(place.name + _OLD)


def put_in_place(run: RunDirectory, step: int, place: Path) -> None:
    """Let the directory ``place`` and the step's change places, durably.

    Raises:
        OSError: nothing changed, or it is not known to be durable; it can be done again.
    """
    target = run.step(step)
    if not exchange(place, target):
        old = place.with_name(place.name + _OLD)
        target.rename(old)
        try:
            place.rename(target)
        except OSError:
            old.rename(target)
            raise
    for directory in (run.root, place.parent):
        atomic.fsync_directory(directory)


def carry_over(run: RunDirectory, step: int, place: Path) -> None:
    """Link into ``place`` the files at the top of the step that belong to no save.

    verl's trainer puts its ``data.pt`` there itself. Links of the same files: until the two change
    places, and should they not, the step has them, too. A step of which not every manifest can be
    read has nothing to give: which save each file is of is not known.

    Raises:
        OSError: it can be done again.
    """
    listed = set()
    for kind in SaveKind:
        path = run.manifest(kind, step)
        try:
            manifest = decode_manifest(records.read_regular(path), path, kind, step).manifest
        except FileNotFoundError:
            continue
        except DamagedFileError:
            return
        listed |= _tops(manifest)
    newer = _manifest(place, step)
    listed |= _tops(newer) if newer is not None else set()
    for entry in run.step(step).iterdir():
        ours = entry.name in listed or is_reserved(entry.name) or atomic.is_temporary(entry.name)
        if ours or entry.is_symlink():
            continue
        target = place / entry.name
        if entry.is_dir():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link, dirs_exist_ok=True)
            for directory, _, _ in os.walk(target):
                atomic.fsync_directory(Path(directory))
        else:
            _link(entry, target)
    atomic.fsync_directory(place)  # the step itself goes, and its links with it


def _tops(manifest: Manifest) -> set[str]:
    return {relative_parts(entry.path)[0] for entry in manifest.files}


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return  # it is done again
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        shutil.copy2(source, target)  # this file system has no links


def put_back(run: RunDirectory, save: SaveDirectory, step: int) -> bool:
    """Undo `put_in_place` if it was done; whether the older save is in its place again.

    Raises:
        OSError: do it again.
    """
    if restore(run, save, step):
        return True
    owner = parse_owner(save.path.parts[-3])
    for place in leftovers(run, save):
        older = _manifest(place, step)
        newer = _manifest(run.step(step), step)
        if older is None or newer is None:
            continue
        if (newer.attempt, newer.incarnation) == owner != (older.attempt, older.incarnation):
            put_in_place(run, step, place)
            return True
    return False


def restore(run: RunDirectory, save: SaveDirectory, step: int) -> bool:
    """Put the older save back if only the first of two renames was done; whether it was.

    Raises:
        OSError: do it again.
    """
    old = leftovers(run, save)[1]
    if not atomic.is_there(old) or atomic.is_there(run.step(step)):
        return False
    old.rename(run.step(step))
    atomic.fsync_directory(run.root)
    return True


def finish(run: RunDirectory) -> list[int]:
    """Complete what a crash left between two renames; the steps. Raises `OSError`."""
    finished = []
    for place in places(run):
        step = parse_step(place.name.rpartition("-")[2])  # None of an old one
        if step is None or atomic.is_there(run.step(step)):
            continue
        # Without the old one beside it, the step went otherwise, and nothing was interrupted.
        interrupted = atomic.is_there(place.with_name(place.name + _OLD))
        if interrupted and _manifest(place, step) is not None:
            place.rename(run.step(step))
            atomic.fsync_directory(run.root)
            finished.append(step)
    return finished


def places(run: RunDirectory) -> list[Path]:
    """Everything that lies aside. Raises `OSError`."""
    try:
        return sorted(run.superseding.iterdir())
    except FileNotFoundError:
        return []


def exchange(first: Path, second: Path) -> bool:
    """Let two names change places in one step; False where the file system cannot.

    Raises:
        OSError: it could, but did not.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def _manifest(directory: Path, step: int) -> Manifest | None:
    path = directory / manifest_name(SaveKind.STATE_DICT)
    try:
        return decode_manifest(records.read_regular(path), path, SaveKind.STATE_DICT, step).manifest
    except (FileNotFoundError, DamagedFileError):
        return None
