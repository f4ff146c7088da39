"""The two pointer files: the newest committed step of each kind. They only ever move forward.

A pointer is a convenience for people and for verl; the manifests are the truth. One that dangles
is repaired to the newest valid manifest. It never silently means "start at step 0".
"""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.errors import (
    DamagedFileError,
    DanglingPointerError,
    FileCheckError,
    PointerChangedError,
)
from trainsync.storage.layout import MAX_STEP, RunDirectory, parse_step
from trainsync.storage.saves.manifest import (
    Committed,
    check_manifest,
    committed_steps,
    read_manifest,
)

_REPAIR_TRIES: Final = 5
_MAX_DIGITS: Final = 100  # Python refuses to read numbers of thousands of digits
_Seen = tuple[int | None, str | None]
"""The step that a pointer names, or the problem with the pointer."""


def read_pointer(run: RunDirectory, kind: SaveKind) -> int | None:
    """The step that the pointer names; None when there is no pointer.

    Raises:
        DamagedFileError: it does not hold a step.
    """
    path = run.pointer(kind)
    try:
        text = records.read_regular(path).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) > MAX_STEP:
        raise DamagedFileError(path, f"holds {text[:40]!r}, expected a step")
    return int(text)


def move_pointer(
    run: RunDirectory, kind: SaveKind, step: int, gate: Callable[[], None] = lambda: None
) -> bool:
    """Name ``step``, unless a newer one is named; whether it moved.

    Args:
        gate: called right before the pointer is replaced; its exception prevents that.

    Raises:
        OSError: nothing changed.
        DamagedFileError: the present one cannot be read; see `repair_pointer`.
        PointerChangedError: another process moved it meanwhile; nothing changed.
    """
    current = read_pointer(run, kind)
    if current is not None and current >= step:
        return False
    _write(run, kind, step, (current, None), gate)
    return True


def put_back(run: RunDirectory, kind: SaveKind, step: int, gate: Callable[[], None]) -> None:
    """Name the newest valid save at or before ``step``, or nothing where there is none.

    Args:
        gate: called right before the pointer is changed; its exception prevents that.

    Raises `OSError`.
    """
    saves = (committed.manifest.step for committed in valid_saves(run, kind, []))
    newest = next((found for found in saves if found <= step), None)
    path = run.pointer(kind)
    if newest is not None:
        atomic.write_bytes(path, f"{newest}\n".encode(), gate)
    elif atomic.is_there(path):
        gate()
        path.unlink(missing_ok=True)
        atomic.fsync_directory(path.parent)


def newest_valid(run: RunDirectory, kind: SaveKind) -> tuple[Committed | None, list[str]]:
    """The newest save of ``kind`` whose manifest and files (by size) stand.

    Returns it, or None when there is none, and a sentence for each newer one that is damaged.
    """
    problems: list[str] = []
    return next(valid_saves(run, kind, problems), None), problems


def valid_saves(run: RunDirectory, kind: SaveKind, problems: list[str]) -> Iterator[Committed]:
    """Saves of ``kind`` whose manifest and files (by size) stand, newest first.

    Args:
        problems: gets a sentence for each one on the way that is damaged.
    """
    for step in reversed(committed_steps(run, kind)):
        try:
            committed = read_manifest(run, kind, step)
            check_manifest(run, committed.manifest, with_digest=False)
        except FileNotFoundError:
            continue  # retention took it between listing and reading
        except (DamagedFileError, FileCheckError) as error:
            problems.append(f"{kind} {step} is damaged: {error}")
            continue
        yield committed


def repair_pointer(
    run: RunDirectory, kind: SaveKind, gate: Callable[[], None] = lambda: None
) -> tuple[Committed | None, list[str]]:
    """Make the pointer agree with the newest valid manifest, backwards if need be.

    To look at all files can take long. If the pointer is moved meanwhile, what was seen is stale,
    and is looked at again, a few times.

    Args:
        gate: called right before the pointer is replaced; its exception prevents that.

    Of a state dict that was set aside (`manifest.set_aside`), with no other left, the pointer goes.

    Returns that save (None when nothing was ever committed, or is left so) and what was wrong.

    Raises:
        DanglingPointerError: there was a commit, and no valid manifest is left.
        PointerChangedError: another process moves the pointer again and again.
    """
    tries = _REPAIR_TRIES
    while True:
        try:
            return _repair(run, kind, gate)
        except PointerChangedError:
            tries -= 1
            if tries == 0:
                raise


def _repair(
    run: RunDirectory, kind: SaveKind, gate: Callable[[], None]
) -> tuple[Committed | None, list[str]]:
    moved = _move_directory(run.pointer(kind), gate)
    # Ahead of the files, so that a commit amid the look is noticed.
    current, damage = before = _look(run, kind)
    newest, problems = newest_valid(run, kind)
    _check_unchanged(run, kind, before)
    if damage is not None:
        problems.append(damage)
    if newest is None:
        if current is None and not problems:
            return None, moved
        if current is not None and not problems and _last_is_aside(run, kind, current):
            gate()
            run.pointer(kind).unlink(missing_ok=True)
            atomic.fsync_directory(run.pointer(kind).parent)
            return None, []
        named = "no step" if current is None else f"step {current}"
        raise DanglingPointerError(
            f"{run.pointer(kind)} names {named}, but no valid manifest is left"
            + "".join(f"; {problem}" for problem in problems)
        )
    step = newest.manifest.step
    if current != step:
        if current is not None and current > step:
            problems.append(f"{run.pointer(kind)} named step {current}, repaired to {step}")
        _write(run, kind, step, before, gate)
    return newest, [*problems, *moved, *_links(run)]


def _move_directory(pointer: Path, gate: Callable[[], None]) -> list[str]:
    """Take a directory out of the pointer's place, where no file could be put; what was done."""
    if not pointer.is_dir() or pointer.is_symlink():
        return []
    gate()
    aside = pointer.with_name(f"{pointer.name}.{secrets.token_hex(4)}.directory")
    pointer.rename(aside)
    return [f"{pointer} was a directory, expected a file: it is {aside.name} now"]


def _links(run: RunDirectory) -> list[str]:
    """A sentence for each step that is not used because it is a symbolic link."""
    return [
        f"{path} is a symbolic link and is not used: move the step's directory itself there"
        for path in sorted(run.root.iterdir())
        if parse_step(path.name) is not None and path.is_symlink()
    ]


def _last_is_aside(run: RunDirectory, kind: SaveKind, step: int) -> bool:
    """Whether the last state dict was set aside. Of checkpoints the last one never is."""
    return kind is SaveKind.STATE_DICT and run.set_aside(kind, step).exists()


def _look(run: RunDirectory, kind: SaveKind) -> _Seen:
    try:
        return read_pointer(run, kind), None
    except DamagedFileError as error:
        return None, str(error)


def _check_unchanged(run: RunDirectory, kind: SaveKind, before: _Seen) -> None:
    if _look(run, kind) != before:
        raise PointerChangedError(f"{run.pointer(kind)} was moved by another process meanwhile")


def _write(
    run: RunDirectory, kind: SaveKind, step: int, before: _Seen, gate: Callable[[], None]
) -> None:
    def unchanged() -> None:
        # The writer may have been stopped, or the disk slow, since it looked.
        gate()
        _check_unchanged(run, kind, before)

    atomic.write_bytes(run.pointer(kind), f"{step}\n".encode(), unchanged)
