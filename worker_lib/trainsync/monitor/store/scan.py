"""Takes what participants put below ``run/saves/`` into the ledger: one listing for each look."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from trainsync.monitor.ledger.ledger import DifferentParticipantsError, Ledger
from trainsync.monitor.ledger.saves import AbortReason, SaveKey, SaveOwner, key_of, reason_of
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.saves.receipts import Participant, ParticipantFailure, Receipt

_LOG = logging.getLogger(__name__)
_AT_ONCE: Final = 16

T = TypeVar("T")


def records_of(bucket: ObjectBucket, key: SaveKey) -> StoredRecords:
    """The records of a save."""
    return StoredRecords(bucket, key.owner.attempt, key.owner.incarnation, key.kind, key.step)


class RecordScan:
    """See the module's docstring. A record is read once: none is changed after it was put."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self._read: set[str] = set()

    def into(self, ledger: Ledger) -> set[SaveKey]:
        """Tell ``ledger`` what is new; returns saves that have ended and have records left.

        Raises:
            StoreError: the store cannot be read.
        """
        left: set[SaveKey] = set()
        seen: set[str] = set()
        for owner in sorted(ledger.owners):
            for key, rests in self._listed(owner).items():
                folder = records_of(self._bucket, key).folder
                seen.update(f"{folder}/{rest}" for rest in rests)
                if self._absorb(ledger, key, folder, rests):
                    left.add(key)
        self._read &= seen
        return left

    def look(self, ledger: Ledger, key: SaveKey, participant: Participant) -> None:
        """Take one receipt, if it is there. Raises `StoreError`."""
        folder = records_of(self._bucket, key).folder
        name = names.receipt(folder, participant)
        if name in self._read:
            return
        found = _understood(lambda: records_of(self._bucket, key).receipt(participant))
        if found is None:
            return
        self._read.add(name)
        if isinstance(found, str):
            ledger.fail(key, AbortReason.BAD_RECORD, found)
        else:
            ledger.receive(found)

    def _listed(self, owner: SaveOwner) -> dict[SaveKey, list[str]]:
        found: dict[SaveKey, list[str]] = {}
        for info in self._bucket.below(names.owner(owner.attempt, owner.incarnation)):
            parsed = names.parse_save(info.key)
            if parsed is not None:
                kind, step, rest = parsed
                found.setdefault(SaveKey(owner, step, kind), []).append(rest)
        return found

    def _absorb(self, ledger: Ledger, key: SaveKey, folder: str, rests: list[str]) -> bool:
        """Take one save's records; whether it has ended and has some left that are not kept."""
        records = records_of(self._bucket, key)
        save = ledger.find(key)
        has_outcome = names.outcome(folder) in {f"{folder}/{rest}" for rest in rests}
        if save is None:
            # It may have ended under a monitor before this one; a listing that is late lacks that,
            # and has records that were removed since.
            try:
                outcome = records.outcome()
            except DamagedFileError as error:
                ledger.fail(key, AbortReason.BAD_RECORD, str(error))
                return False
            if outcome is not None and outcome.manifest_digest is not None:
                ledger.ended_committed(key, outcome.manifest_digest)
            elif outcome is not None:
                ledger.aborted(key, outcome.error or "")
            save = ledger.find(key)
        parts = {rest: found for rest in rests if (found := names.parse_participant(rest))}
        if save is not None and not save.open:
            return bool(parts) or not has_outcome
        self._register(ledger, key, records, folder, rests)
        new = [rest for rest in sorted(parts) if f"{folder}/{rest}" not in self._read]
        for rest, record in zip(new, self._fetch(records, [parts[r] for r in new]), strict=True):
            if record is None:
                continue  # removed since; the next look sees
            self._read.add(f"{folder}/{rest}")
            if isinstance(record, str):
                ledger.fail(key, AbortReason.BAD_RECORD, record)
            elif isinstance(record, Receipt):
                ledger.receive(record)
            else:
                message = f"{record.participant}: {record.error}"
                ledger.fail(key, reason_of(record.error), message)
        return False

    def _register(
        self, ledger: Ledger, key: SaveKey, records: StoredRecords, folder: str, rests: list[str]
    ) -> None:
        name = names.registration(folder)
        if name in self._read or name not in {f"{folder}/{rest}" for rest in rests}:
            return
        found = _understood(records.registration)
        if found is None:
            return
        self._read.add(name)
        if isinstance(found, str):
            ledger.fail(key, AbortReason.BAD_RECORD, found)
        elif key_of(found) != key:
            ledger.fail(key, AbortReason.BAD_RECORD, f"{name} is of another save")
        else:
            try:
                ledger.register(found)
            except DifferentParticipantsError as error:
                ledger.fail(key, AbortReason.BAD_RECORD, str(error))

    def _fetch(
        self, records: StoredRecords, parts: list[tuple[Participant, bool]]
    ) -> list[Receipt | ParticipantFailure | str | None]:
        def read(part: tuple[Participant, bool]) -> Receipt | ParticipantFailure | str | None:
            participant, has_failed = part
            if has_failed:
                return _understood(lambda: records.failure(participant))
            return _understood(lambda: records.receipt(participant))

        if len(parts) < 2:
            return [read(part) for part in parts]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trainsync-records") as pool:
            return list(pool.map(read, parts))


def _understood(read: Callable[[], T]) -> T | str:
    """The result of ``read``; a sentence where the record cannot be understood."""
    try:
        return read()
    except DamagedFileError as error:
        return str(error)
