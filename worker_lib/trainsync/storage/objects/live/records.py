"""Records of participants and the monitor about one save, each put once and never changed."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import records
from trainsync.storage.errors import DamagedFileError, SecondWriterError
from trainsync.storage.layout import parse_step
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectExistsError
from trainsync.storage.objects.live import names, references
from trainsync.storage.saves.receipts import (
    Participant,
    ParticipantFailure,
    Receipt,
    Rescue,
    SaveOutcome,
    SaveRegistration,
)

_RECEIPT: Final = TypeAdapter(Receipt)
_FAILURE: Final = TypeAdapter(ParticipantFailure)
_RESCUE: Final = TypeAdapter(Rescue)
_REGISTRATION: Final = TypeAdapter(SaveRegistration)
_OUTCOME: Final = TypeAdapter(SaveOutcome)

RecordT = TypeVar("RecordT")


class StoredRecords:
    """The records of one save of one incarnation. All methods raise `StoreError`.

    Reading raises `DamagedFileError`, too, where a record cannot be understood.
    """

    def __init__(
        self, bucket: ObjectBucket, attempt: int, incarnation: str, kind: SaveKind, step: int
    ) -> None:
        self.bucket: Final = bucket
        self.folder: Final = names.save(attempt, incarnation, kind, step)
        self._identity = (kind, step, attempt, incarnation)

    def outcome(self) -> SaveOutcome | None:
        """How the save ended; None while it is open."""
        return self._find(_OUTCOME, names.outcome(self.folder))

    def registration(self) -> SaveRegistration | None:
        """The participants; None while they are not known."""
        return self._find(_REGISTRATION, names.registration(self.folder))

    def writers(self) -> list[Participant]:
        """The participants with a receipt or a failure, by the names of their objects."""
        found = set()
        for info in self.bucket.below(self.folder):
            parsed = names.parse_participant(info.key.removeprefix(f"{self.folder}/"))
            if parsed is not None:
                found.add(parsed[0])
        return sorted(found)

    def has_failed(self) -> bool:
        """Whether a participant could not save."""
        return bool(self.bucket.below(names.failures(self.folder)))

    def is_there(self) -> bool:
        """Whether there is any record of the save."""
        return bool(self.bucket.below(self.folder))

    def receipt(self, participant: Participant) -> Receipt | None:
        """The participant's receipt; None: there is none."""
        found = self._find(_RECEIPT, key := names.receipt(self.folder, participant))
        if found is not None:
            self._agree(
                key,
                (found.kind, found.step, found.attempt, found.incarnation, found.participant),
                participant,
            )
            references.check_older(key, found)
        return found

    def failure(self, participant: Participant) -> ParticipantFailure | None:
        """Why the participant could not save; None: it did not say that."""
        found = self._find(_FAILURE, key := names.failure(self.folder, participant))
        if found is not None:
            self._agree(
                key,
                (found.kind, found.step, found.attempt, found.incarnation, found.participant),
                participant,
            )
        return found

    def write_receipt(self, receipt: Receipt) -> None:
        """Put ``receipt``; its objects must be there.

        Raises:
            SecondWriterError: another process has put one for the participant.
        """
        key = names.receipt(self.folder, receipt.participant)
        try:
            self.bucket.create(key, records.encode(_RECEIPT, receipt))
        except ObjectExistsError:
            raise SecondWriterError(
                f"{receipt.participant} of {receipt.kind.value} {receipt.step} was written by "
                "another process of this attempt, whose receipt stands: give each process its own "
                "rank, and start all of them again when one dies"
            ) from None

    def write_failure(self, failure: ParticipantFailure) -> None:
        """Put ``failure``; the first one of a participant stands."""
        self._once(names.failure(self.folder, failure.participant), _FAILURE, failure)

    def rescues(self) -> list[Rescue]:
        """Records of participants whose processes died."""
        keys = [info.key for info in self.bucket.below(names.rescues(self.folder))]
        found = [self._find(_RESCUE, key) for key in keys]
        return [rescue for rescue in found if rescue is not None]

    def write_rescue(self, rescue: Rescue) -> None:
        """Put ``rescue``; the first one of a participant stands."""
        self._once(names.rescue(self.folder, rescue.participant), _RESCUE, rescue)

    def has_rescue(self, participant: Participant) -> bool:
        """Whether that is said of the participant."""
        return self.bucket.size(names.rescue(self.folder, participant)) is not None

    def want_copies(self) -> None:
        """Let what has copies of parts write them."""
        with suppress(ObjectExistsError):
            self.bucket.create(names.copies_wanted(self.folder), b"")

    def are_copies_wanted(self) -> bool:
        """Whether that was said."""
        return self.bucket.size(names.copies_wanted(self.folder)) is not None

    def write_registration(self, registration: SaveRegistration) -> None:
        """Put ``registration``; the first one stands."""
        self._once(names.registration(self.folder), _REGISTRATION, registration)

    def write_outcome(self, outcome: SaveOutcome) -> None:
        """Put ``outcome``; the first one stands."""
        self._once(names.outcome(self.folder), _OUTCOME, outcome)

    def _once(self, key: str, adapter: TypeAdapter[RecordT], record: RecordT) -> None:
        try:
            self.bucket.create(key, records.encode(adapter, record))
        except ObjectExistsError:
            return

    def _find(self, adapter: TypeAdapter[RecordT], key: str) -> RecordT | None:
        blob = self.bucket.find(key)
        return None if blob is None else records.decode(adapter, blob.data, Path(key))

    def _agree(self, key: str, said: tuple[object, ...], participant: Participant) -> None:
        if said != (*self._identity, participant):
            raise DamagedFileError(Path(key), "speaks of another save or participant")


def registered(
    bucket: ObjectBucket, attempt: int, incarnation: str, kind: SaveKind
) -> Iterator[int]:
    """Steps of which a save of ``kind`` is registered and not yet forgotten, the greatest first."""
    folder = f"{names.owner(attempt, incarnation)}/{kind.value}"
    steps = sorted(
        (
            step
            for key in bucket.folders(folder)
            if (step := parse_step(key.rpartition("/")[2])) is not None
        ),
        reverse=True,
    )
    for step in steps:
        there = StoredRecords(bucket, attempt, incarnation, kind, step)
        if bucket.find(names.registration(there.folder)) is not None:
            yield step
