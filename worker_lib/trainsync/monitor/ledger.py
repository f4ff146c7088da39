"""The ledger: which saves are open, complete, committed or aborted. Pure: no clock, no I/O.

What was seen goes in through methods (`grant`, `register`, `receive`, `fail`, `verified`,
`committed`, `aborted`), in any order and any number of times; what follows from it comes out of
`decisions`, which the core carries out. The same facts give the same decisions whatever their
order, so a ledger rebuilt from disk goes on where the lost one stopped.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.storage.receipts import FileEntry, Participant, Receipt, Registration


class AbortReason(StrEnum):
    """Why a save was aborted, for programs; the sentence beside it is for people."""

    PARTICIPANT_FAILED = "participant_failed"
    DEADLINE = "deadline"
    BAD_FILE = "bad_file"
    BAD_RECORD = "bad_record"
    NOT_REGISTERED = "not_registered"
    CONFLICT = "conflict"
    STATE_DICT_ABORTED = "state_dict_aborted"
    IO_ERROR = "io_error"


@dataclass(frozen=True, order=True)
class Owner:
    """Whose save it is: one incarnation of one attempt."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, order=True)
class SaveKey:
    """One save of one incarnation."""

    owner: Owner
    step: int
    kind: SaveKind

    def __str__(self) -> str:
        return f"{self.kind} {self.step} of attempt {self.owner.attempt}"


@dataclass(frozen=True)
class CommittedInfo:
    """What the ledger remembers of a manifest."""

    step: int
    owner: Owner
    digest: str
    bytes: int
    time: datetime


@dataclass(frozen=True, order=True)
class Cause:
    """Why a save is, or has to be, aborted."""

    reason: AbortReason
    message: str


@dataclass
class Save:
    """What is known of one save.

    Every receipt of a large save asks what follows from it, so what decides is kept up to date
    rather than counted anew: ``missing`` and ``strangers`` against the registration, ``unverified``
    receipts, paths that are listed ``twice``.
    """

    key: SaveKey
    state: SaveState = SaveState.UNKNOWN
    registration: Registration | None = None
    receipts: dict[Participant, Receipt] = field(default_factory=dict)
    unverified: dict[Participant, Receipt] = field(default_factory=dict)
    checking: dict[Participant, Receipt] = field(default_factory=dict)
    missing: set[Participant] = field(default_factory=set)
    strangers: set[Participant] = field(default_factory=set)
    paths: Counter[str] = field(default_factory=Counter)
    twice: set[str] = field(default_factory=set)
    causes: list[Cause] = field(default_factory=list)
    error: str | None = None
    manifest_digest: str | None = None
    unregistered_since: datetime | None = None

    @property
    def open(self) -> bool:
        """Whether it can still go either way."""
        return self.state in (SaveState.UNKNOWN, SaveState.REGISTERED)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file that a receipt lists, sorted by path."""
        return tuple(sorted(e for receipt in self.receipts.values() for e in receipt.files))

    def take(self, receipt: Receipt) -> None:
        """A new or changed receipt."""
        who = receipt.participant
        before = self.receipts.get(who)
        if before is not None:
            self._count(before.files, -1)
        self._count(receipt.files, 1)
        self.receipts[who] = self.unverified[who] = receipt
        self.checking.pop(who, None)
        if self.registration is not None and before is None:
            if who in self.missing:
                self.missing.remove(who)
            else:
                self.strangers.add(who)

    def expect(self, registration: Registration) -> None:
        """Who takes part is known."""
        self.registration = registration
        members = set(registration.participants)
        self.missing = members - self.receipts.keys()
        self.strangers = self.receipts.keys() - members

    def forget_details(self) -> None:
        """It ended."""
        for kept in (self.receipts, self.unverified, self.checking, self.paths):
            kept.clear()
        self.missing, self.strangers, self.twice, self.causes = set(), set(), set(), []

    def _count(self, files: tuple[FileEntry, ...], by: int) -> None:
        for entry in files:
            self.paths[entry.path] += by
            if self.paths[entry.path] > 1:
                self.twice.add(entry.path)
            else:
                self.twice.discard(entry.path)


@dataclass(frozen=True)
class Verify:
    """Compare the files of this receipt with the disk."""

    key: SaveKey
    receipt: Receipt


@dataclass(frozen=True)
class Commit:
    """Everything is there and verified: promote and commit."""

    key: SaveKey
    registration: Registration
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Abort:
    """The save can never be complete."""

    key: SaveKey
    cause: Cause


Decision = Verify | Commit | Abort


class DifferentParticipantsError(ValueError):
    """A save is registered again with other participants, or by another incarnation."""


class Ledger:
    """See the module's docstring.

    Args:
        save_deadline: a save that lacks a receipt so long after its registration, or is not
            registered so long after its first receipt was seen, is aborted.
    """

    def __init__(self, save_deadline: timedelta) -> None:
        self._save_deadline = save_deadline
        self._attempt: int | None = None
        self._incarnations: dict[str, str] = {}
        self._saves: dict[SaveKey, Save] = {}
        self._committed: dict[SaveKind, dict[int, CommittedInfo]] = {k: {} for k in SaveKind}

    def copy_empty(self) -> "Ledger":
        """A new ledger with the same settings."""
        return Ledger(self._save_deadline)

    # What is in force.

    @property
    def attempt(self) -> int | None:
        """The newest granted attempt."""
        return self._attempt

    @property
    def owners(self) -> frozenset[Owner]:
        """The incarnations in force, one for each cluster that claimed."""
        if self._attempt is None:
            return frozenset()
        return frozenset(Owner(self._attempt, i) for i in self._incarnations.values())

    def grant(self, cluster: str, owner: Owner) -> None:
        """A claim is granted; saves of older attempts that are still open are superseded.

        A claim older than the one in force changes nothing.
        """
        if self._attempt is not None and owner.attempt < self._attempt:
            return
        if owner.attempt != self._attempt:
            self._attempt = owner.attempt
            self._incarnations = {}
            self._saves = {}
        self._incarnations[cluster] = owner.incarnation

    # What was seen.

    def register(self, registration: Registration) -> Save:
        """The full set of participants is known. Saves that ended stay as they are.

        Raises:
            DifferentParticipantsError: it contradicts an earlier registration.
        """
        key = key_of(registration)
        save = self._save(key)
        for other in self._saves.values():
            same = (other.key.kind, other.key.step) == (key.kind, key.step)
            if same and other.key != key and other.registration is not None:
                raise DifferentParticipantsError(
                    f"{key} is registered by another incarnation of the same attempt"
                )
        if save.registration is None:
            save.expect(registration)
            if save.open:
                save.state = SaveState.REGISTERED
        elif (
            set(save.registration.participants) != set(registration.participants)
            or save.registration.reuse_state_dict != registration.reuse_state_dict
        ):
            raise DifferentParticipantsError(f"{key} is registered with other participants")
        return save

    def receive(self, receipt: Receipt) -> None:
        """A receipt is on disk; a changed one has to be verified again."""
        if not self._in_force(key_of(receipt)):
            return
        save = self._save(key_of(receipt))
        if save.open and save.receipts.get(receipt.participant) != receipt:
            save.take(receipt)

    def fail(self, key: SaveKey, reason: AbortReason, message: str) -> None:
        """The save cannot be completed."""
        if not self._in_force(key):
            return
        save = self._save(key)
        cause = Cause(reason, message)
        if save.open and cause not in save.causes:
            save.causes.append(cause)

    def checking(self, key: SaveKey, receipt: Receipt) -> None:
        """Its files are being compared: do not ask for it again."""
        save = self._saves.get(key)
        if save is not None and save.unverified.get(receipt.participant) is receipt:
            save.checking[receipt.participant] = save.unverified.pop(receipt.participant)

    def verified(self, key: SaveKey, receipt: Receipt) -> None:
        """The files of this very receipt are as it says."""
        save, who = self._saves.get(key), receipt.participant
        if save is not None and save.receipts.get(who) == receipt:
            save.unverified.pop(who, None)
            save.checking.pop(who, None)

    def unchecked(self, key: SaveKey, receipt: Receipt) -> None:
        """Its files could not be compared; ask again."""
        save, who = self._saves.get(key), receipt.participant
        if save is not None and save.checking.get(who) == receipt:
            save.unverified[who] = save.checking.pop(who)

    def committed(self, kind: SaveKind, info: CommittedInfo) -> None:
        """A manifest is durable."""
        self._committed[kind][info.step] = info
        key = SaveKey(info.owner, info.step, kind)
        if info.owner in self.owners:
            save = self._save(key)
            save.state = SaveState.COMMITTED
            save.error, save.manifest_digest = None, info.digest
            save.forget_details()

    def ended_committed(self, key: SaveKey, manifest_digest: str) -> None:
        """The save was committed once; its step may be gone by retention."""
        save = self._save(key)
        save.state, save.manifest_digest = SaveState.COMMITTED, manifest_digest
        save.forget_details()

    def aborted(self, key: SaveKey, error: str) -> None:
        """The save is aborted, for ever; a committed one stays committed."""
        save = self._save(key)
        if save.open:
            save.state, save.error = SaveState.ABORTED, error
            save.forget_details()

    def uncommitted(self, kind: SaveKind, step: int) -> None:
        """The manifest is gone (retention) or invalid."""
        self._committed[kind].pop(step, None)

    def forget(self, keys: Iterable[SaveKey]) -> None:
        """Drop saves that ended; unknown and open ones are passed over."""
        for key in keys:
            if key in self._saves and not self._saves[key].open:
                del self._saves[key]

    # What follows.

    def decisions(self, now: datetime) -> list[Decision]:
        """What to do next, older steps first, state dicts before checkpoints of the same step."""
        found: list[Decision] = []
        order = sorted(self._saves.values(), key=lambda s: (s.key.step, s.key.kind != "state_dict"))
        for save in order:
            if save.open:
                found.extend(self._decide(save, now))
        return found

    def find(self, key: SaveKey) -> Save | None:
        """What is known of a save of the attempt in force."""
        return self._saves.get(key)

    def saves(self) -> list[Save]:
        """Every save of the attempt in force, by key."""
        return [self._saves[key] for key in sorted(self._saves)]

    def info(self, kind: SaveKind, step: int) -> CommittedInfo | None:
        """The manifest of ``kind`` at ``step``."""
        return self._committed[kind].get(step)

    def newest(self, kind: SaveKind) -> CommittedInfo | None:
        """The manifest with the largest step."""
        of_kind = self._committed[kind]
        return of_kind[max(of_kind)] if of_kind else None

    def steps(self, kind: SaveKind) -> list[int]:
        """Committed steps, in order."""
        return sorted(self._committed[kind])

    def infos(self, kind: SaveKind) -> list[CommittedInfo]:
        """Every manifest of ``kind``, in no order."""
        return list(self._committed[kind].values())

    def last_error(self) -> str | None:
        """Error of the newest aborted save, until a newer one of its kind is committed."""
        for save in sorted(self._saves.values(), key=lambda s: -s.key.step):
            newest = self.newest(save.key.kind)
            if save.state is SaveState.ABORTED and (newest is None or newest.step < save.key.step):
                return f"{save.key}: {save.error}"
        return None

    def _in_force(self, key: SaveKey) -> bool:
        # A check or a hint can outlive the attempt that it belongs to.
        return key.owner in self.owners

    def _save(self, key: SaveKey) -> Save:
        if key not in self._saves:
            save = self._saves[key] = Save(key)
            info = self.info(key.kind, key.step)
            if info is not None and info.owner == key.owner:
                # Its record was forgotten; it must not be opened again under its own manifest.
                save.state, save.manifest_digest = SaveState.COMMITTED, info.digest
        return self._saves[key]

    def _decide(self, save: Save, now: datetime) -> list[Decision]:
        cause = self._hopeless(save, now)
        if cause is not None:
            return [Abort(save.key, cause)]
        todo: list[Decision] = [
            Verify(save.key, save.unverified[who]) for who in sorted(save.unverified)
        ]
        registration = save.registration
        if todo or registration is None or save.missing or save.checking:
            return todo
        if registration.reuse_state_dict:
            base = self.info(SaveKind.STATE_DICT, save.key.step)
            if base is None or base.owner != save.key.owner:
                return []  # its own state dict is still open
        return [Commit(save.key, registration, save.files)]

    def _hopeless(self, save: Save, now: datetime) -> Cause | None:
        if save.causes:
            return min(save.causes)  # whichever came first: the same facts, the same cause
        registration = save.registration
        if registration is None:
            return self._unregistered(save, now)
        if save.strangers:
            return Cause(
                AbortReason.NOT_REGISTERED,
                f"{_some(sorted(save.strangers))} wrote a receipt but is not among the "
                f"{len(registration.participants)} registered participants",
            )
        if save.twice:
            return Cause(AbortReason.CONFLICT, f"{min(save.twice)} is written by two participants")
        if not (save.missing or registration.reuse_state_dict or +save.paths):
            return Cause(AbortReason.BAD_RECORD, "no participant wrote any file")
        if registration.reuse_state_dict:
            base = self.info(SaveKind.STATE_DICT, save.key.step)
            other = self._saves.get(SaveKey(save.key.owner, save.key.step, SaveKind.STATE_DICT))
            replaced = other is not None and other.open and other.registration is not None
            if base is not None and base.owner != save.key.owner and not replaced:
                # Its weights beside our optimizer would be a mixture of two trainings.
                return Cause(
                    AbortReason.CONFLICT,
                    f"the state dict of step {save.key.step}, whose files it reuses, is of "
                    f"attempt {base.owner.attempt}: save the checkpoint with its own weights",
                )
            if other is not None and other.state is SaveState.ABORTED:
                return Cause(
                    AbortReason.STATE_DICT_ABORTED,
                    f"the state dict of step {save.key.step}, whose files it reuses, was "
                    f"aborted: {other.error}",
                )
        return self._overdue(save, registration, now)

    def _overdue(self, save: Save, registration: Registration, now: datetime) -> Cause | None:
        if now - registration.created_at <= self._save_deadline:
            return None
        within = f"within {self._save_deadline.total_seconds():g} s"
        if save.missing:
            missing = _some(sorted(save.missing))
            return Cause(AbortReason.DEADLINE, f"no receipt of {missing} {within}")
        if registration.reuse_state_dict and not self._state_dict_expected(save.key):
            return Cause(
                AbortReason.DEADLINE,
                f"the state dict of step {save.key.step}, whose files it reuses, was not "
                f"registered {within}",
            )
        # Complete: whoever was away for longer than the deadline still commits it.
        return None

    def _state_dict_expected(self, key: SaveKey) -> bool:
        """Whether the state dict of the step is committed, or has a deadline of its own to meet."""
        if self.info(SaveKind.STATE_DICT, key.step) is not None:
            return True
        other = self._saves.get(SaveKey(key.owner, key.step, SaveKind.STATE_DICT))
        return other is not None and other.registration is not None

    def _unregistered(self, save: Save, now: datetime) -> Cause | None:
        if not save.receipts:
            return None
        if save.unregistered_since is None:
            save.unregistered_since = now
        if now - save.unregistered_since <= self._save_deadline:
            return None
        return Cause(
            AbortReason.NOT_REGISTERED,
            f"{_some(sorted(save.receipts))} wrote a receipt, but nobody registered the save "
            f"within {self._save_deadline.total_seconds():g} s",
        )


def key_of(record: Registration | Receipt) -> SaveKey:
    """The save that a record belongs to."""
    return SaveKey(Owner(record.attempt, record.incarnation), record.step, record.kind)


def _some(participants: list[Participant]) -> str:
    shown = ", ".join(str(who) for who in participants[:5])
    return shown if len(participants) <= 5 else f"{shown} and {len(participants) - 5} more"
