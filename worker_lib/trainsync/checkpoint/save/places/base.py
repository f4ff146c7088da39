"""Interface of the place that saves go to. Calls raise `OSError` and `StorageError`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from trainsync.api.protocol import SaveKind
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.receipts import (
    FileEntry,
    Participant,
    ParticipantFailure,
    Receipt,
    Rescue,
    SaveOutcome,
    SaveRegistration,
)

Produce = Callable[[BinaryIO], object]
"""Writes the bytes of a file into it."""


class SaveRecords(Protocol):
    """The records of one save of this attempt, to be read."""

    def outcome(self) -> SaveOutcome | None:
        """How the monitor ended the save; None while it is open."""
        ...

    def registration(self) -> SaveRegistration | None:
        """The participants; None while they are not registered, or when the monitor cleaned up."""
        ...

    def writers(self) -> list[Participant]:
        """The participants with a receipt or a failure."""
        ...

    def has_failed(self) -> bool:
        """Whether a participant could not save: the save will be aborted."""
        ...

    def rescues(self) -> list[Rescue]:
        """Records of participants whose processes died before their receipts."""
        ...

    def write_rescue(self, rescue: Rescue) -> None:
        """Say that of one."""
        ...

    def has_rescue(self, participant: Participant) -> bool:
        """Whether that is said of one."""
        ...

    def want_copies(self) -> None:
        """Say that no process of the save's incarnation lives any more, so that parts of which
        nothing is heard may be written from copies in memory."""
        ...

    def are_copies_wanted(self) -> bool:
        """Whether that was said."""
        ...

    def is_there(self) -> bool:
        """Whether anything is known of the save; else it was never begun, or is over long since."""
        ...


class PartPlace(Protocol):
    """Where one part of a save goes: its files, then its receipt. For one thread at a time."""

    @property
    def writer(self) -> str:
        """Names in the receipt whose files these are."""
        ...

    @property
    def records(self) -> SaveRecords:
        """The save's records, as they are read while the part is written."""
        ...

    @property
    def kept(self) -> dict[str, str]:
        """See `Receipt`: files of this part that an older step has, and that were not written."""
        ...

    @property
    def based(self) -> dict[str, Base]:
        """See `Receipt`: files of this part that an older step has a part of."""
        ...

    def claim(self) -> tuple[str, ...]:
        """See that no other process that lives writes this part; asked again before the receipt.

        Returns the writers that are dead, whose place this one has taken.

        Raises:
            SecondWriterError: another process writes it, or has.
        """
        ...

    def withdraw(self) -> None:
        """Take back a receipt of a dead writer, which speaks of other bytes."""
        ...

    def write_state(self, path: str, produce: Produce, size: int) -> list[FileEntry]:
        """Write the file of a state, which is durable then.

        Returns its entry, and that of what lies beside the file.

        Args:
            path: relative to the step.
            produce: writes the file's bytes, the same ones each time.
            size: of them, about.

        Raises:
            UnsafePathError: ``path`` leads out of the step.
            FileNotFoundError: the save has ended.
            SaveFailedError: another incarnation is in force: nobody is to be told.
        """
        ...

    def write_small(self, files: Mapping[str, bytes]) -> list[FileEntry]:
        """Write small files, by path, durably."""
        ...

    def produce(self, save_fn: Callable[[Path], object]) -> None:
        """Let ``save_fn`` write into an empty directory of its own."""
        ...

    def adopt(self, place: Callable[[str], str]) -> list[FileEntry]:
        """Put what `produce` left where ``place`` says, durably.

        Raises:
            CheckpointError: it left nothing, or something that is not a regular file.
        """
        ...

    def clear(self) -> None:
        """Remove what `produce` left, as far as it can be removed."""
        ...

    def write_receipt(self, receipt: Receipt) -> None:
        """Say that the part's files are durable."""
        ...

    def write_failure(self, failure: ParticipantFailure) -> None:
        """Say that the part could not be written."""
        ...


class SavePlace(Protocol):
    """Where all saves of one attempt's incarnation go."""

    @property
    def writer(self) -> str | None:
        """Names this process as the writer of all its parts; None: each part has a name of its
        own."""
        ...

    def save(self, kind: SaveKind, step: int) -> SaveRecords:
        """The records of one save."""
        ...

    def part(
        self,
        kind: SaveKind,
        step: int,
        participant: Participant,
        retry_limits: RetryLimits | None = None,
    ) -> PartPlace:
        """Where a part goes. Does nothing yet.

        Args:
            retry_limits: of requests to a store that is away, while the part is written; None: a
                few tries. A volume has none.

        Raises:
            UnsafePathError: it is no name of a participant.
        """
        ...

    def registered(self, kind: SaveKind) -> Iterator[int]:
        """Steps of which a save of ``kind`` is registered, the greatest first."""
        ...
