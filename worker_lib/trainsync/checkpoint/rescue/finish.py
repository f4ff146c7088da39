"""Writes a part from memory to where the save goes, as its rank would have."""

import logging
import time
from contextlib import closing
from dataclasses import replace
from typing import Final

from trainsync.checkpoint.memory.writing import FileInMemory
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey
from trainsync.checkpoint.save.places.base import Place, SaveRecords
from trainsync.failpoints import failpoint
from trainsync.storage.errors import SecondWriterError, StorageError
from trainsync.storage.patience import Patience
from trainsync.storage.saves.receipts import ParticipantFailure, Rescue

logger = logging.getLogger(__name__)

FINISH_SECONDS: Final = 60.0
"""For so long a part is written again where the store is away, and a restart waits for it."""

_MAX_ERROR: Final = 4096  # characters


def is_wanted(save: SaveRecords, part: PartKey) -> bool:
    """Whether the save is open and lacks the part. Raises `OSError`, `StorageError`."""
    return save.outcome() is None and part.participant not in save.writers()


def say(save: SaveRecords, part: PartKey, *, kept: bool) -> None:
    """Say that the part's process has died. Raises `OSError`, `StorageError`."""
    participant = part.participant
    save.write_rescue(Rescue(component=participant.component, rank=participant.rank, kept=kept))


def finish(place: Place, part: PartKey, kept: KeptPart) -> None:
    """Write the part's files from memory, and its receipt.

    Raises:
        OSError, StorageError: it cannot be written, or is not in memory any more.
        ValueError: what is in memory is not what was kept.
    """
    started = time.monotonic()
    until = started + FINISH_SECONDS
    there = place.part(part.kind, part.step, part.participant, Patience(until))
    there.claim()
    failpoint("rescue.finishing")
    there.withdraw()
    (expected,) = kept.receipt.files
    with closing(FileInMemory(kept.file)) as memory:
        entries = there.write_state(expected.path, memory.produce, expected.bytes)
    if entries[0] != expected:
        raise ValueError(f"{kept.file} has changed in memory")
    entries += there.write_small(kept.attachments)
    receipt = replace(
        kept.receipt,
        files=tuple(entries),
        seconds=kept.receipt.seconds + time.monotonic() - started,
        writer=there.writer,
        replaces=there.claim(),
        rescued=True,
    )
    failpoint("rescue.written")
    if there.records.outcome() is not None:
        raise FileNotFoundError("the save has ended meanwhile")
    there.write_receipt(receipt)
    logger.warning(
        "the process of %s died: its part of %s %d was written from memory, %d bytes in %.1f s",
        *(part.participant, part.kind.value, part.step),
        *(expected.bytes, time.monotonic() - started),
    )


def rescue(place: Place, parts: dict[PartKey, KeptPart | None]) -> None:
    """Finish the parts of a process that has died, those of the newest step first; never raises.

    Args:
        parts: that were begun and have not ended; None: it is not whole in memory.
    """
    wanted = []
    for part, kept in sorted(parts.items(), key=lambda item: -item[0].step):
        try:
            save = place.save(part.kind, part.step)
            if is_wanted(save, part):
                say(save, part, kept=kept is not None)
                wanted.append((part, kept))
        except (OSError, StorageError) as error:
            _log(part, error)
    for part, kept in wanted:
        if kept is None:
            continue
        try:
            finish(place, part, kept)
        except SecondWriterError as error:
            _log(part, error)  # a process that was started anew writes it
        except Exception as error:  # noqa: BLE001 - the other parts are finished all the same
            _log(part, error)
            _fail(place, part, kept, error)


def _fail(place: Place, part: PartKey, kept: KeptPart, error: Exception) -> None:
    """Let nothing wait for the part any more."""
    receipt = kept.receipt
    failure = ParticipantFailure(
        kind=receipt.kind,
        step=receipt.step,
        attempt=receipt.attempt,
        incarnation=receipt.incarnation,
        component=receipt.component,
        rank=receipt.rank,
        error=f"its process died, and from memory: {type(error).__name__}: {error}"[:_MAX_ERROR],
    )
    try:
        if is_wanted(place.save(part.kind, part.step), part):
            place.part(part.kind, part.step, part.participant).write_failure(failure)
    except (OSError, StorageError) as again:
        _log(part, again)


def _log(part: PartKey, error: Exception) -> None:
    logger.error(
        "%s of %s %d is not written from memory: %s: %s",
        *(part.participant, part.kind.value, part.step, type(error).__name__, error),
    )
