"""Records of one save in staging: registration, receipts, failures, outcome.

Participants write receipts and failures, the monitor writes the rest; every write is atomic. No
name of what participants write is durable before the monitor makes it so: receipts' by an fsync of
``receipts/`` ahead of the promotion, files' by the promotion. What goes with the machine before
leaves a save that was not committed.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.digest import PATTERN as DIGEST_PATTERN
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import FAILURE_SUFFIX, SaveDirectory
from trainsync.storage.saves.based import Base

Count = Annotated[int, Field(ge=0)]
Component = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
Seconds = Annotated[float, Field(ge=0)]
Incarnation = Annotated[str, Field(pattern=r"^[a-z0-9]{8,32}$")]


@dataclass(frozen=True, order=True)
class Participant:
    """One writer of a save: a component (``model``, ``optim``, …) of one rank."""

    component: Component
    rank: Count

    def __str__(self) -> str:
        return f"{self.component}.{self.rank}"


@dataclass(frozen=True, order=True)
class FileEntry:
    """A file and what its bytes must be; ``path`` is relative to ``files/`` or to the step."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    bytes: Count
    digest: Annotated[str, Field(pattern=DIGEST_PATTERN)]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A participant's files are in its staging directory, and their bytes are durable.

    ``seconds``: from the first byte to the last fsync. ``blocked_seconds``: how long training
    stood still for it. ``slot_seconds``: how much of that it waited for staging memory.
    ``queue_seconds``: how long it waited between staging and writing.
    ``writer``: whose files they are, see `SaveDirectory.files_of`; None: of an older release.
    ``replaces``: writers of the same participant that were found dead; see
    `trainsync.storage.saves.writers`.
    ``staged_bytes``: what was copied out of the live state. ``coordinates``: where the rank stands
    in the trainer's parallel dimensions (tp, pp, …), if the trainer says so; for people.
    ``kept``: of each file that has not changed since an older step and was not written again, by
    path, the key of that step's object; on a volume its file, below the run's directory.
    ``rescued``: they were written from memory after the participant's process had died.
    ``based``: of each file in a store of which the object has a part, by path, where the rest is;
    with it ``version`` is 2, so that releases refuse it that would take the object for the file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    attempt: Count
    incarnation: Incarnation
    component: Component
    rank: Count
    world_size: Annotated[int, Field(ge=1)]
    files: tuple[FileEntry, ...]
    seconds: Seconds
    blocked_seconds: Seconds = 0.0
    slot_seconds: Seconds = 0.0
    queue_seconds: Seconds = 0.0
    staged_bytes: Count = 0
    coordinates: dict[str, Count] = field(default_factory=dict)
    writer: Incarnation | None = None
    replaces: tuple[Incarnation, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    rescued: bool = False
    based: dict[str, Base] = field(default_factory=dict)
    version: Literal[1, 2] = 1

    @property
    def participant(self) -> Participant:
        """The participant that wrote the receipt."""
        return Participant(self.component, self.rank)

    @property
    def written_bytes(self) -> int:
        """How many bytes of the files were written for it."""
        return sum(entry.bytes for entry in self.files) - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """How many bytes of the files an older step has, and were not written again."""
        return sum(kept_bytes(entry, self.kept, self.based) for entry in self.files)


@dataclass(frozen=True, kw_only=True)
class ParticipantFailure:
    """A participant could not save; the save will be aborted with ``error`` as its cause."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    attempt: Count
    incarnation: Incarnation
    component: Component
    rank: Count
    error: Annotated[str, Field(max_length=4096)]
    version: Literal[1] = 1

    @property
    def participant(self) -> Participant:
        """The participant that failed."""
        return Participant(self.component, self.rank)


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """A participant's process has died before its receipt; see
    `trainsync.checkpoint.rescue.process`.

    ``kept``: its files are whole in memory, and are being written from there.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    component: Component
    rank: Count
    kept: bool
    version: Literal[1] = 1

    @property
    def participant(self) -> Participant:
        """The participant."""
        return Participant(self.component, self.rank)


@dataclass(frozen=True, kw_only=True)
class SaveRegistration:
    """The full set of a save's participants, as the trainer registered it."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    attempt: Count
    incarnation: Incarnation
    run_uid: str
    participants: Annotated[tuple[Participant, ...], Field(min_length=1)]
    created_at: AwareDatetime
    reuse_state_dict: bool = False
    version: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """The end of a save: ``error`` when it was aborted, ``manifest_digest`` when committed."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    kind: SaveKind
    step: Count
    error: str | None = None
    manifest_digest: str | None = None
    version: Literal[1] = 1


def kept_bytes(entry: FileEntry, kept: Mapping[str, str], based: Mapping[str, Base]) -> int:
    """How many bytes of a file an older step has; ``kept`` and ``based`` as in `Receipt`."""
    if entry.path in kept:
        return entry.bytes
    base = based.get(entry.path)
    return 0 if base is None else entry.bytes - base.own_bytes(entry.bytes)


_RECORD = re.compile(r"^([a-z0-9_]{1,64})\.(0|[1-9][0-9]{0,8})(?:\.failed)?\.json$")
_RECEIPT = TypeAdapter(Receipt)
_FAILURE = TypeAdapter(ParticipantFailure)
_RESCUE = TypeAdapter(Rescue)
_REGISTRATION = TypeAdapter(SaveRegistration)
_OUTCOME = TypeAdapter(SaveOutcome)


def write_receipt(save: SaveDirectory, receipt: Receipt) -> Path:
    """Write ``receipt``, atomically; the bytes of the participant's files must be durable."""
    path = save.receipt(receipt.component, receipt.rank)
    atomic.make_directory(path.parent)
    atomic.write_bytes(path, records.encode(_RECEIPT, receipt), durably=False)
    return path


def withdraw_receipt(save: SaveDirectory, participant: Participant) -> None:
    """Remove the participant's receipt, durably: its files are written again. Raises `OSError`."""
    path = save.receipt(participant.component, participant.rank)
    if atomic.is_there(path):
        atomic.write_bytes(save.withdrawn, b"", durably=False)
        path.unlink(missing_ok=True)
        atomic.fsync_directory(path.parent)


def read_receipt(path: Path) -> Receipt:
    """Raises `FileNotFoundError`, `DamagedFileError`: also one with what only a store has."""
    receipt = records.read(_RECEIPT, path)
    if receipt.based or receipt.version != 1:
        raise DamagedFileError(path, "names parts of files, which a volume does not have")
    _agree(path, path.name, f"{receipt.participant}.json")
    return receipt


def write_failure(save: SaveDirectory, failure: ParticipantFailure) -> Path:
    """Write ``failure``, atomically."""
    path = save.failure(failure.component, failure.rank)
    atomic.make_directory(path.parent)
    atomic.write_bytes(path, records.encode(_FAILURE, failure), durably=False)
    return path


def read_failure(path: Path) -> ParticipantFailure:
    """Raises `FileNotFoundError`, `DamagedFileError`."""
    failure = records.read(_FAILURE, path)
    _agree(path, path.name, f"{failure.participant}.failed.json")
    return failure


def writers(save: SaveDirectory) -> list[Participant]:
    """The participants with a receipt or a failure, by the names of the files. Raises `OSError`."""
    found = set()
    with suppress(FileNotFoundError):
        for path in save.receipts.iterdir():
            if (match := _RECORD.match(path.name)) is not None:
                found.add(Participant(match[1], int(match[2])))
    return sorted(found)


def write_rescue(save: SaveDirectory, rescue: Rescue) -> None:
    """Write ``rescue``, atomically."""
    path = save.rescue(rescue.component, rescue.rank)
    atomic.make_directory(path.parent, durably=False)
    atomic.write_bytes(path, records.encode(_RESCUE, rescue), durably=False)


def rescues(save: SaveDirectory) -> list[Rescue]:
    """Records of participants whose processes died. Raises `OSError`, `DamagedFileError`."""
    try:
        paths = [path for path in save.rescues.iterdir() if _RECORD.match(path.name)]
        return [records.read(_RESCUE, path) for path in paths]
    except FileNotFoundError:  # the save has ended
        return []


def want_copies(save: SaveDirectory) -> None:
    """Let what has copies of parts write them. Raises `FileNotFoundError`: the save has ended."""
    atomic.write_bytes(save.copies_wanted, b"", durably=False)


def has_failed(save: SaveDirectory) -> bool:
    """Whether a participant could not save, by the names of the files. Raises `OSError`."""
    try:
        return any(path.name.endswith(FAILURE_SUFFIX) for path in save.receipts.iterdir())
    except FileNotFoundError:
        return False


def write_registration(save: SaveDirectory, registration: SaveRegistration) -> None:
    """Write ``registration``, atomically."""
    atomic.make_directory(save.path)
    atomic.write_bytes(save.registration, records.encode(_REGISTRATION, registration))


def read_registration(save: SaveDirectory) -> SaveRegistration:
    """Raises `FileNotFoundError`, `DamagedFileError`."""
    return records.read(_REGISTRATION, save.registration)


def write_outcome(save: SaveDirectory, outcome: SaveOutcome) -> None:
    """Write ``ABORTED.json`` or ``COMMITTED.json``, atomically."""
    path = save.aborted if outcome.error is not None else save.committed
    atomic.make_directory(save.path)
    atomic.write_bytes(path, records.encode(_OUTCOME, outcome))


def read_outcome(save: SaveDirectory) -> SaveOutcome | None:
    """The outcome of the save; None while it has none. Raises `DamagedFileError`."""
    for path in (save.committed, save.aborted):
        try:
            return records.read(_OUTCOME, path)
        except FileNotFoundError:
            continue
    return None


def _agree(path: Path, name: str, expected: str) -> None:
    if name != expected:
        raise DamagedFileError(path, f"speaks for {expected}, not for {name}")
