"""Tells the process that outlives this one of the copies of other ranks' parts that are taken."""

import logging
import threading
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import SealedFile
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, decode_about
from trainsync.checkpoint.rescue.rescuer import Rescuer

logger = logging.getLogger(__name__)


class GuestParts:
    """The copies of parts whose saves have not ended, as far as this process knows. Thread-safe.

    Args:
        rescuer: is told of them.
        attempt, incarnation: of this process.
    """

    def __init__(self, rescuer: Rescuer, attempt: int, incarnation: str) -> None:
        self._rescuer = rescuer
        self._owner: Final = (attempt, incarnation)
        self._lock = threading.Lock()
        self._parts: set[PartKey] = set()

    def taken(self, file: SealedFile) -> None:
        """A copy is whole in memory; one beside which nothing is told is of use to a load alone."""
        told = file.describe(file)
        if not told:
            return
        try:
            about = decode_about(told)
            receipt = about.receipt
            said = (receipt.attempt, receipt.incarnation, receipt.step, receipt.participant)
            if said != (*self._owner, file.step, file.participant):
                raise ValueError(f"it is of {said}")
            if [(entry.bytes, entry.digest) for entry in receipt.files] != [
                (file.bytes, file.digest)
            ]:
                raise ValueError("it is of another file")
            if receipt.kept or receipt.based or receipt.replaces or receipt.writer is not None:
                raise ValueError("it says where the file is in the run's storage")
        except ValueError as error:
            logger.warning("what a neighbour tells of %s is not understood: %s", file.path, error)
            return
        part = PartKey(receipt.kind, receipt.step, receipt.participant)
        with self._lock:
            self._parts.add(part)
        kept = KeptPart(file=file.path, receipt=receipt, attachments=about.attachments)
        self._rescuer.copied(part, kept, about.writer)

    def ended(self, step: int, committed: bool) -> None:
        """The checkpoint of ``step`` has ended; with a commit, all before."""
        with self._lock:
            over = {part for part in self._parts if _is_over(part, step, committed)}
            self._parts -= over
        for part in over:
            self._rescuer.ended(part)


def _is_over(part: PartKey, step: int, committed: bool) -> bool:
    if committed and part.step < step:
        return True
    return part.kind is SaveKind.CHECKPOINT and part.step == step
