"""Compares the two pointers with the committed steps."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.inspect.findings import Code, Finding, Severity
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.saves import pointers

_REMEDIES: Final = ("a monitor that starts writes it", "a monitor moves it on")


def targets(run: RunDirectory) -> dict[SaveKind, int]:
    """The step that each pointer names; one that is absent or not understood names nothing."""
    found = {}
    for kind in SaveKind:
        try:
            step = pointers.read_pointer(run, kind)
        except DamagedFileError:
            continue  # `check_pointers` says so
        if step is not None:
            found[kind] = step
    return found


def newest_valid(saves: Sequence[InspectedSave], kind: SaveKind) -> int | None:
    """The newest step of ``kind`` in which nothing wrong was found."""
    return max((s.step for s in saves if s.kind is kind and s.valid), default=None)


def check_pointers(run: RunDirectory, saves: Sequence[InspectedSave]) -> list[Finding]:
    """Pointers that name nothing, or nothing whole, or less than the newest.

    Args:
        saves: all of the run's, checked.

    Raises:
        OSError: a pointer cannot be read.
    """
    found = (
        judge(kind, run.pointer(kind).name, partial(pointers.read_pointer, run, kind), saves)
        for kind in SaveKind
    )
    return [finding for finding in found if finding is not None]


def judge(
    kind: SaveKind,
    name: str,
    read: Callable[[], int | None],
    saves: Sequence[InspectedSave],
    remedies: tuple[str, str] = _REMEDIES,
) -> Finding | None:
    """Compare what the pointer ``name`` of ``kind`` says with the saves; None: nothing is wrong.

    Args:
        read: the step that it names; `DamagedFileError` when it names none.
        remedies: what writes a pointer that is missing, and what moves one that is behind.
    """
    newest = newest_valid(saves, kind)
    try:
        step = read()
    except DamagedFileError as error:
        return _finding(name, kind, Code.POINTER, error.why)
    if step is None:
        if newest is None:
            return None
        text = f"is missing, though step {newest} is committed: {remedies[0]}"
        return _finding(name, kind, Code.POINTER_BEHIND, text, newest)
    named = next((save for save in saves if (save.step, save.kind) == (step, kind)), None)
    if named is None:
        text = f"names step {step}, which has no manifest of a {kind.value}"
        return _finding(name, kind, Code.POINTER_DANGLING, text, step)
    if not named.valid:
        text = f"names {step_name(step)}, which is damaged"
        return _finding(name, kind, Code.POINTER_DANGLING, text, step)
    if newest is not None and newest > step:
        text = f"names step {step}, though step {newest} is committed: {remedies[1]}"
        return _finding(name, kind, Code.POINTER_BEHIND, text, step)
    return None


def _finding(
    name: str, kind: SaveKind, code: Code, message: str, step: int | None = None
) -> Finding:
    severity = Severity.LEFTOVER if code is Code.POINTER_BEHIND else Severity.DAMAGE
    return Finding(severity, code, name, message, step, kind)
