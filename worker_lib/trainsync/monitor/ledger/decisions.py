"""Decides what to do with a save: verify, commit, abort or wait. Pure functions.

Only a save that lacks something can be late: one whose receipts are all there commits whenever a
monitor comes, and a checkpoint that reuses a state dict waits for the state dict's own deadline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol

from trainsync.api.protocol import SaveKind, SaveState, is_skip
from trainsync.api.spec import UNREGISTERED_WARNING_SECONDS
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, CommittedInfo, Save, SaveKey
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt, SaveRegistration

_UNREGISTERED_LONG: Final = timedelta(seconds=UNREGISTERED_WARNING_SECONDS)
"""A save is mostly registered within a second of its first receipt, before or after."""


@dataclass(frozen=True)
class VerifyReceipt:
    """Compare the files of this receipt with the disk."""

    key: SaveKey
    receipt: Receipt


@dataclass(frozen=True)
class CommitSave:
    """Everything is there and verified: promote and commit.

    ``writers`` says which writer wrote the file of each path.
    """

    key: SaveKey
    registration: SaveRegistration
    files: tuple[FileEntry, ...]
    writers: Mapping[str, str | None]


@dataclass(frozen=True)
class AbortSave:
    """The save can never be complete."""

    key: SaveKey
    cause: AbortCause


Decision = VerifyReceipt | CommitSave | AbortSave


class Known(Protocol):
    """The questions that a decision asks of the rest of the run (the ledger)."""

    def info(self, kind: SaveKind, step: int) -> CommittedInfo | None:
        """The manifest of ``kind`` at ``step``."""

    def find(self, key: SaveKey) -> Save | None:
        """Another save of the attempt in force."""


def decide(save: Save, known: Known, now: datetime, deadline: timedelta) -> list[Decision]:
    """The next step for an open ``save``.

    Args:
        known: what was committed, and the other saves of the attempt.
        deadline: how long after its registration a save may lack a receipt, and how long after
            its first receipt was seen it may lack its registration.
    """
    cause = _hopeless(save, known, now, deadline)
    if cause is not None:
        return [AbortSave(save.key, cause)]
    todo: list[Decision] = [
        VerifyReceipt(save.key, save.unverified[participant])
        for participant in sorted(save.unverified)
    ]
    registration = save.registration
    if todo or registration is None or save.missing or save.checking:
        return todo
    if _waits_for_state_dict(save.key, registration, known):
        return []
    return [CommitSave(save.key, registration, save.files, save.writers)]


def _waits_for_state_dict(key: SaveKey, registration: SaveRegistration, known: Known) -> bool:
    base = known.info(SaveKind.STATE_DICT, key.step)
    if registration.reuse_state_dict:
        return base is None or base.owner != key.owner
    if key.kind is SaveKind.STATE_DICT or base is None or base.owner == key.owner:
        return False
    # Beside an older attempt's weights it would conflict, and would keep its own ones out.
    return _registered_and_open(_state_dict(key, known))


def _hopeless(save: Save, known: Known, now: datetime, deadline: timedelta) -> AbortCause | None:
    if save.causes:
        return min(save.causes)  # whichever came first: the same facts, the same cause
    registration = save.registration
    if registration is None:
        return _unregistered(save, now, deadline)
    if save.strangers:
        return AbortCause(
            AbortReason.NOT_REGISTERED,
            f"{_some(sorted(save.strangers))} wrote a receipt but is not among the "
            f"{len(registration.participants)} registered participants",
        )
    if save.twice:
        return AbortCause(AbortReason.CONFLICT, f"{min(save.twice)} is written by two participants")
    if not (save.missing or registration.reuse_state_dict or +save.paths):
        return AbortCause(AbortReason.BAD_RECORD, "no participant wrote any file")
    if registration.reuse_state_dict:
        base = known.info(SaveKind.STATE_DICT, save.key.step)
        other = _state_dict(save.key, known)
        replaced = _registered_and_open(other)
        if base is not None and base.owner != save.key.owner and not replaced:
            # Its weights beside our optimizer would be a mixture of two trainings.
            return AbortCause(
                AbortReason.CONFLICT,
                f"the state dict of step {save.key.step}, whose files it reuses, is of "
                f"attempt {base.owner.attempt}: save the checkpoint with its own weights",
            )
        if other is not None and other.state is SaveState.ABORTED:
            skipped = is_skip(other.error)
            return AbortCause(
                AbortReason.SKIPPED if skipped else AbortReason.STATE_DICT_ABORTED,
                f"the state dict of step {save.key.step}, whose files it reuses, was "
                f"aborted: {other.error}",
            )
    return _overdue(save, registration, known, now, deadline)


def _overdue(
    save: Save, registration: SaveRegistration, known: Known, now: datetime, deadline: timedelta
) -> AbortCause | None:
    if now - registration.created_at <= deadline:
        return None
    within = f"within {deadline.total_seconds():g} s"
    if save.missing:
        missing = _some(sorted(save.missing))
        return AbortCause(AbortReason.DEADLINE, f"no receipt of {missing} {within}")
    if registration.reuse_state_dict and not _state_dict_expected(save.key, known):
        return AbortCause(
            AbortReason.DEADLINE,
            f"the state dict of step {save.key.step}, whose files it reuses, was not "
            f"registered {within}",
        )
    # Complete: a monitor that was away for longer than the deadline still commits it.
    return None


def _state_dict_expected(key: SaveKey, known: Known) -> bool:
    """Whether the state dict of the step is committed, or has a deadline of its own to meet."""
    if known.info(SaveKind.STATE_DICT, key.step) is not None:
        return True
    other = _state_dict(key, known)
    return other is not None and other.registration is not None


def _state_dict(key: SaveKey, known: Known) -> Save | None:
    """The state of the owner's own state dict at the step."""
    return known.find(SaveKey(key.owner, key.step, SaveKind.STATE_DICT))


def _registered_and_open(save: Save | None) -> bool:
    return save is not None and save.open and save.registration is not None


def _unregistered(save: Save, now: datetime, deadline: timedelta) -> AbortCause | None:
    if not save.receipts:
        return None
    if save.unregistered_since is None:
        save.unregistered_since = now
    save.unregistered_long = now - save.unregistered_since > _UNREGISTERED_LONG
    if now - save.unregistered_since <= deadline:
        return None
    return AbortCause(
        AbortReason.NOT_REGISTERED,
        f"{_some(sorted(save.receipts))} wrote a receipt, but no process registered the save "
        f"within {deadline.total_seconds():g} s",
    )


def _some(participants: list[Participant]) -> str:
    shown = ", ".join(str(participant) for participant in participants[:5])
    return shown if len(participants) <= 5 else f"{shown} and {len(participants) - 5} more"
