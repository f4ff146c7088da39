"""The two pointer files: the newest committed step of each kind. They only ever move forward.

A pointer is a convenience for people and for verl; the manifests are the truth. One that dangles
is repaired to the newest valid manifest. It never silently means "start at step 0".
"""

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.errors import (
    DamagedFileError,
    DanglingPointerError,
    FileCheckError,
)
from trainsync.storage.layout import MAX_STEP, RunDirectory
from trainsync.storage.manifest import (
    Committed,
    check_manifest,
    committed_steps,
    read_manifest,
)


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
    if not text.isdecimal() or int(text) > MAX_STEP:
        raise DamagedFileError(path, f"holds {text[:40]!r}, expected a step")
    return int(text)


def move_pointer(run: RunDirectory, kind: SaveKind, step: int) -> bool:
    """Name ``step``, unless a newer one is named; whether it moved.

    Raises:
        OSError: nothing changed.
        DamagedFileError: the present one cannot be read; see `repair_pointer`.
    """
    current = read_pointer(run, kind)
    if current is not None and current >= step:
        return False
    _write(run, kind, step)
    return True


def newest_valid(run: RunDirectory, kind: SaveKind) -> tuple[Committed | None, list[str]]:
    """The newest save of ``kind`` whose manifest and files (by size) stand.

    Returns it, or None when there is none, and a sentence for each newer one that is damaged.
    """
    problems = []
    for step in reversed(committed_steps(run, kind)):
        try:
            committed = read_manifest(run, kind, step)
            check_manifest(run, committed.manifest, with_digest=False)
        except FileNotFoundError:
            continue  # retention took it between listing and reading
        except (DamagedFileError, FileCheckError) as error:
            problems.append(f"{kind} {step} is damaged: {error}")
            continue
        return committed, problems
    return None, problems


def repair_pointer(run: RunDirectory, kind: SaveKind) -> tuple[Committed | None, list[str]]:
    """Make the pointer agree with the newest valid manifest, backwards if need be.

    Returns that save (None when nothing was ever committed) and what was found wrong.

    Raises:
        DanglingPointerError: there was a commit, and no valid manifest is left.
    """
    newest, problems = newest_valid(run, kind)
    try:
        current = read_pointer(run, kind)
    except DamagedFileError as error:
        problems.append(str(error))
        current = -1
    if newest is None:
        if current is None and not problems:
            return None, []
        raise DanglingPointerError(
            f"{run.pointer(kind)} names step {current}, but no valid manifest is left"
            + "".join(f"; {problem}" for problem in problems)
        )
    step = newest.manifest.step
    if current != step:
        if current is not None and current > step:
            problems.append(f"{run.pointer(kind)} named step {current}, repaired to {step}")
        _write(run, kind, step)
    return newest, problems


def _write(run: RunDirectory, kind: SaveKind, step: int) -> None:
    atomic.write_bytes(run.pointer(kind), f"{step}\n".encode())
