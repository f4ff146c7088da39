"""Takes what is in staging into the ledger."""

from collections.abc import Callable, Iterable

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.ledger import DifferentParticipantsError, Ledger
from trainsync.monitor.ledger.saves import AbortReason, SaveKey, key_of, reason_of
from trainsync.storage.atomic import is_there
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.saves.receipts import FileEntry, read_receipt
from trainsync.storage.saves.scan import SaveOnDisk, Scanner

FinishAbort = Callable[[SaveKey, Iterable[FileEntry]], None]


def drop_withdrawn(ledger: Ledger, key: SaveKey, directory: SaveDirectory) -> bool:
    """Whether a receipt that the ledger knows was withdrawn since, and so is dropped there.

    The new one, if it is there, comes with the next scan. Raises `OSError`.
    """
    save = ledger.find(key)
    if save is None or not is_there(directory.withdrawn):
        return False
    stale = []
    for participant, known in save.receipts.items():
        try:
            is_same = (
                read_receipt(directory.receipt(participant.component, participant.rank)) == known
            )
        except (FileNotFoundError, DamagedFileError):
            is_same = False
        if not is_same:
            stale.append(participant)
    for participant in stale:
        ledger.withdrawn(key, participant)
    return bool(stale)


class StagingScan:
    """Scans the staging of every incarnation in force.

    Args:
        finish_abort: told the promoted files of a save whose abort was interrupted.
    """

    def __init__(self, run: RunDirectory, finish_abort: FinishAbort) -> None:
        self._scanner = Scanner(run)
        self._finish_abort = finish_abort

    def into(self, ledger: Ledger, *, everything: bool) -> None:
        """Tell ``ledger`` what is there; saves that ended only with ``everything``.

        Raises:
            OSError, StorageError: the volume cannot be read.
        """
        for owner in sorted(ledger.owners):

            def skip(kind: SaveKind, step: int) -> bool:
                save = ledger.find(SaveKey(owner, step, kind))  # noqa: B023 - called at once
                return not everything and save is not None and not save.open

            for found in self._scanner.saves(owner.attempt, owner.incarnation, skip):
                self._absorb(ledger, SaveKey(owner, found.step, found.kind), found)

    def _absorb(self, ledger: Ledger, key: SaveKey, found: SaveOnDisk) -> None:
        outcome, registration = found.outcome, found.registration
        if registration is not None:
            if key_of(registration) != key:
                ledger.fail(key, AbortReason.BAD_RECORD, "REGISTRATION.json is of another save")
            else:
                try:
                    ledger.register(registration)
                except DifferentParticipantsError as error:
                    ledger.fail(key, AbortReason.BAD_RECORD, str(error))
        if outcome is not None:
            if outcome.manifest_digest is not None:
                ledger.ended_committed(key, outcome.manifest_digest)
                return
            ledger.aborted(key, outcome.error or "")
            # A monitor died amid an abort: what it had half promoted is known from receipts.
            files = [entry for receipt in found.receipts for entry in receipt.files]
            if files:
                self._finish_abort(key, files)
            return
        for receipt in found.receipts:
            ledger.receive(receipt)
        for failure in found.failures:
            message = f"{failure.participant}: {failure.error}"
            ledger.fail(key, reason_of(failure.error), message)
        for message in found.damaged:
            ledger.fail(key, AbortReason.BAD_RECORD, message)
