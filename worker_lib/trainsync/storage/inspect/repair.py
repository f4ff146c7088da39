"""Repairs what a crash or a person left in a run's directory; never touches a valid save."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic
from trainsync.storage.errors import DamagedFileError, PointerChangedError, UnsafePathError
from trainsync.storage.inspect.findings import (
    Code,
    Finding,
    entries,
    is_real_directory,
    relative,
    walk_files,
)
from trainsync.storage.inspect.internal import out_of_place
from trainsync.storage.inspect.saves import (
    InspectedSave,
    check_digests,
    check_sizes,
    committed_pairs,
)
from trainsync.storage.layout import RunDirectory, inside, set_aside_name
from trainsync.storage.leases import LeaseBook
from trainsync.storage.saves import manifest, pointers, retention, superseding

OLD_SECONDS: Final = 3600.0
"""A temporary file that was not written to for so long has no writer any more."""

_TRASH_TRIES: Final = 10


class ActionKind(StrEnum):
    """The kind of an action; stable, for programs."""

    PUT_IN_PLACE = "put_in_place"
    SET_ASIDE = "set_aside"
    MOVE_POINTER = "move_pointer"
    REMOVE_TEMPORARY = "remove_temporary"
    REMOVE_LEASES = "remove_leases"
    EMPTY_TRASH = "empty_trash"
    REMOVE_ORPHANS = "remove_orphans"


@dataclass(frozen=True)
class Action:
    """One thing to do; ``message`` goes on after ``path``, relative to the directory."""

    act: ActionKind
    path: str
    message: str
    do: Callable[[], bool]
    """Does it; False when the directory has changed so that it no longer applies. `OSError`."""

    def to_json_dict(self) -> dict[str, object]:
        """The action for ``--json``."""
        return {"act": self.act.value, "path": self.path, "message": self.message}


@dataclass(frozen=True)
class RepairPlan:
    """The actions that are possible, and a sentence for each pointer that cannot be repaired."""

    actions: tuple[Action, ...]
    refused: tuple[str, ...]


def plan_places(run: RunDirectory) -> list[Action]:
    """Complete what a crash left between two renames. To be done before `plan_pointers`.

    Raises:
        OSError: the volume cannot be read.
    """
    return [
        Action(
            ActionKind.PUT_IN_PLACE,
            relative(run, path),
            f"a crash kept step {step} from its place; put there",
            lambda step=step: step in superseding.finish(run),  # type: ignore[misc]
        )
        for path, step in out_of_place(run)
    ]


def plan_pointers(
    run: RunDirectory,
    *,
    kinds: Iterable[SaveKind] = tuple(SaveKind),
    with_digest: bool,
    threads: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> RepairPlan:
    """Make each pointer name the newest valid save of its kind, where it does not.

    A save is valid when its manifest and all its files stand, by size or by digest. One that is
    newer and wrong by its digests alone is set aside first: a monitor, which judges by size, would
    resume from it again. With nothing valid left it stays, and can be looked at.

    Raises:
        OSError: the volume cannot be read.
    """
    actions, refused = [], []
    for kind in kinds:
        there = [step for step, k in committed_pairs(run) if k is kind]
        current, problem = _read(run, kind)
        newest, wrong = None, []
        for step in reversed(there):
            save = check_sizes(run, step, kind)
            if save is not None and save.valid and with_digest:
                save = _first(check_digests(run, [save], threads=threads, on_bytes=on_bytes))
                if save is not None and not save.valid:
                    wrong.append(save)
            if save is not None and save.valid:
                newest = step
                break
        if newest is not None:
            actions += [_set_aside(run, save) for save in wrong]
        path = run.pointer(kind)
        if newest is None and (there or current is not None or problem is not None):
            was = problem or ("is missing" if current is None else f"names step {current}")
            refused.append(
                f"{path.name}: {was}, and no valid manifest of a {kind.value} is left to move it "
                "to; it stays as it is"
            )
        elif newest is not None and (newest != current or problem is not None):
            was = problem or ("is missing" if current is None else f"names step {current}")
            actions.append(
                Action(
                    ActionKind.MOVE_POINTER,
                    relative(run, path),
                    f"{was}; moved to step {newest}, the newest valid {kind.value}",
                    _pointer_mover(run, kind, (current, problem), newest),
                )
            )
    return RepairPlan(tuple(actions), tuple(refused))


def plan_cleanup(run: RunDirectory, findings: Sequence[Finding], now: float) -> list[Action]:
    """Remove old temporaries and ended leases among ``findings``, and empty the trash.

    Args:
        now: seconds since 1970.

    Raises:
        OSError: the volume cannot be read.
    """
    actions = []
    for finding in findings:
        try:
            age = now - (run.root / finding.path).lstat().st_mtime
        except FileNotFoundError:
            continue
        if finding.code is Code.TEMPORARY and age > OLD_SECONDS:
            text = f"a temporary file, not written to for {age / 3600:.0f} h; removed"
            actions.append(
                Action(ActionKind.REMOVE_TEMPORARY, finding.path, text, _remover(run, finding.path))
            )
    ended = [finding.path.rpartition("/")[2] for finding in findings if finding.code is Code.LEASE]
    if ended:
        text = f"{len(ended)} leases that ended without being released; removed: {', '.join(ended)}"
        actions.append(
            Action(ActionKind.REMOVE_LEASES, relative(run, run.leases), text, _lease_remover(run))
        )
    try:
        trash = entries(run.trash) if is_real_directory(run, run.trash) else []
    except UnsafePathError:
        trash = []  # a finding of its own
    if trash:
        size = sum(size_of(Path(entry.path)) for entry in trash)
        text = f"{len(trash)} discarded entries, {size} bytes; deleted"
        actions.append(
            Action(ActionKind.EMPTY_TRASH, relative(run, run.trash), text, _trash_emptier(run))
        )
    return actions


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; links count for themselves."""
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        return sum(entry.stat(follow_symlinks=False).st_size for entry in walk_files(path))
    except FileNotFoundError:
        return 0  # another process was faster


def empty_trash(run: RunDirectory) -> None:
    """`retention.empty_trash`, also while a monitor empties it. Raises `OSError`."""
    for _ in range(_TRASH_TRIES):
        try:
            retention.empty_trash(run)
        except FileNotFoundError:
            continue  # the other one was faster; what it left is ours
        return


def _read(run: RunDirectory, kind: SaveKind) -> tuple[int | None, str | None]:
    try:
        return pointers.read_pointer(run, kind), None
    except DamagedFileError as error:
        return None, error.why


def _first(saves: Sequence[InspectedSave]) -> InspectedSave | None:
    return saves[0] if saves else None


def _set_aside(run: RunDirectory, save: InspectedSave) -> Action:
    path = run.manifest(save.kind, save.step)
    committed = save.committed
    assert committed is not None, "its files were read as it lists them"
    first = save.findings[0]
    text = f"{first}; the manifest is set aside as {set_aside_name(save.kind)}"
    # A monitor may have replaced the save, or retention have taken it, since it was read.
    return Action(
        ActionKind.SET_ASIDE, relative(run, path), text, lambda: manifest.set_aside(run, committed)
    )


def _pointer_mover(
    run: RunDirectory, kind: SaveKind, expected: tuple[int | None, str | None], step: int
) -> Callable[[], bool]:
    def unchanged() -> None:
        # A monitor may have moved it, or retention have taken the step, since it was planned.
        if _read(run, kind) != expected or not run.manifest(kind, step).is_file():
            raise PointerChangedError(f"{run.pointer(kind)} was moved by another process meanwhile")

    def move() -> bool:
        try:
            unchanged()
            # Once more, right before the rename: to write the new pointer can take long.
            atomic.write_bytes(run.pointer(kind), f"{step}\n".encode(), unchanged)
        except PointerChangedError:
            return False
        return True

    return move


def _remover(run: RunDirectory, path: str) -> Callable[[], bool]:
    def remove() -> bool:
        try:
            inside(run.root, path).unlink()
        except (FileNotFoundError, UnsafePathError):
            return False
        return True

    return remove


def _lease_remover(run: RunDirectory) -> Callable[[], bool]:
    # Under the lock: a reader that was only slow may have renewed its lease since.
    return lambda: bool(LeaseBook(run).remove_expired(time.monotonic()))


def _trash_emptier(run: RunDirectory) -> Callable[[], bool]:
    def empty() -> bool:
        empty_trash(run)
        return True

    return empty
