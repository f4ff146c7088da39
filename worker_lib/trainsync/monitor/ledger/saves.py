"""The state of one save, and the names of its parts. Pure: no clock, no I/O."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from trainsync.api.protocol import SaveKind, SaveState, is_skip
from trainsync.storage.saves.incarnations import generation
from trainsync.storage.saves.manifest import Age
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt, SaveRegistration


class AbortReason(StrEnum):
    """Why a save was aborted, for programs; the sentence beside it is for people."""

    PARTICIPANT_FAILED = "participant_failed"
    SKIPPED = "skipped"
    """A rank had no staging memory free, and is configured to skip then: no error."""
    DEADLINE = "deadline"
    BAD_FILE = "bad_file"
    BAD_RECORD = "bad_record"
    NOT_REGISTERED = "not_registered"
    CONFLICT = "conflict"
    STATE_DICT_ABORTED = "state_dict_aborted"
    IO_ERROR = "io_error"
    RESTARTED = "restarted"
    """The attempt was restarted in place before the save was complete: no error."""


def reason_of(error: str) -> AbortReason:
    """The reason for an abort because a participant reported ``error``."""
    return AbortReason.SKIPPED if is_skip(error) else AbortReason.PARTICIPANT_FAILED


@dataclass(frozen=True, order=True)
class SaveOwner:
    """The owner of a save: one incarnation of one attempt."""

    attempt: int
    incarnation: str

    @property
    def restarts(self) -> int:
        """How often the attempt was restarted in place before this incarnation."""
        return generation(self.incarnation)

    @property
    def age(self) -> Age:
        """Age of this owner's saves."""
        return True, self.attempt, self.restarts


@dataclass(frozen=True, order=True)
class SaveKey:
    """One save of one incarnation."""

    owner: SaveOwner
    step: int
    kind: SaveKind

    def __str__(self) -> str:
        return f"{self.kind} {self.step} of attempt {self.owner.attempt}"


@dataclass(frozen=True)
class CommittedInfo:
    """The ledger's record of a manifest."""

    step: int
    owner: SaveOwner
    digest: str
    bytes: int
    time: datetime
    foreign: bool = False
    """Saved by another run of this name and path, before this one was made."""

    @property
    def age(self) -> Age:
        """See `Manifest.age`."""
        return not self.foreign, self.owner.attempt, self.owner.restarts


@dataclass(frozen=True, order=True)
class AbortCause:
    """Why a save is, or has to be, aborted."""

    reason: AbortReason
    message: str


@dataclass
class Save:
    """The state of one save.

    Every receipt of a large save asks what follows from it, so what decides is kept up to date
    rather than counted anew: ``missing`` and ``strangers`` against the registration, ``unverified``
    receipts, paths that are listed ``twice``.
    """

    key: SaveKey
    state: SaveState = SaveState.UNKNOWN
    registration: SaveRegistration | None = None
    receipts: dict[Participant, Receipt] = field(default_factory=dict)
    unverified: dict[Participant, Receipt] = field(default_factory=dict)
    checking: dict[Participant, Receipt] = field(default_factory=dict)
    missing: set[Participant] = field(default_factory=set)
    strangers: set[Participant] = field(default_factory=set)
    paths: Counter[str] = field(default_factory=Counter)
    twice: set[str] = field(default_factory=set)
    causes: list[AbortCause] = field(default_factory=list)
    error: str | None = None
    manifest_digest: str | None = None
    unregistered_since: datetime | None = None
    unregistered_long: bool = False
    """Parts wait for their registration for so long that the trainer may have forgotten it."""
    dead: set[str] = field(default_factory=set)
    """Writers whose place others have taken: nothing that they wrote counts any more."""
    late: set[Participant] = field(default_factory=set)
    """Participants that wrote a part after the commit, unregistered: the save lacks it."""

    @property
    def open(self) -> bool:
        """Whether it can still go either way."""
        return self.state in (SaveState.UNKNOWN, SaveState.REGISTERED)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file that a receipt lists, sorted by path."""
        return tuple(sorted(e for receipt in self.receipts.values() for e in receipt.files))

    @property
    def writers(self) -> dict[str, str | None]:
        """Which writer wrote the file of each path; see `SaveDirectory.files_of`."""
        return {e.path: receipt.writer for receipt in self.receipts.values() for e in receipt.files}

    def counts(self, receipt: Receipt) -> bool:
        """Whether it is not of a training before the one that writes the save now.

        Successors of dead writers write all of it again, and what was rescued of writers that have
        none yet is older, too: with a part of each it would be a mixture.
        """
        is_older = bool(receipt.rescued and self.dead and not receipt.replaces)
        return receipt.writer not in self.dead and not is_older

    def take(self, receipt: Receipt) -> None:
        """A new or changed receipt."""
        self.dead.update(receipt.replaces)
        for stale in [part for part, known in self.receipts.items() if not self.counts(known)]:
            self.drop(stale)
        participant = receipt.participant
        before = self.receipts.get(participant)
        if before is not None:
            self._count(before.files, -1)
        self._count(receipt.files, 1)
        self.receipts[participant] = self.unverified[participant] = receipt
        self.checking.pop(participant, None)
        if self.registration is not None and before is None:
            if participant in self.missing:
                self.missing.remove(participant)
            else:
                self.strangers.add(participant)

    def drop(self, participant: Participant) -> None:
        """Its receipt counts no more."""
        self._count(self.receipts.pop(participant).files, -1)
        self.unverified.pop(participant, None)
        self.checking.pop(participant, None)
        self.strangers.discard(participant)
        if self.registration is not None and participant in self.registration.participants:
            self.missing.add(participant)

    def expect(self, registration: SaveRegistration) -> None:
        """The participants are known."""
        self.registration = registration
        self.unregistered_long = False
        members = set(registration.participants)
        self.missing = members - self.receipts.keys()
        self.strangers = self.receipts.keys() - members

    def forget_details(self) -> None:
        """Drop the details of a save that has ended."""
        self.unregistered_long = False
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


def key_of(record: SaveRegistration | Receipt) -> SaveKey:
    """The save that a record belongs to."""
    return SaveKey(SaveOwner(record.attempt, record.incarnation), record.step, record.kind)
