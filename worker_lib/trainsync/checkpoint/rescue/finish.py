"""Writes parts from memory to where their saves go, as their rank would have."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

from trainsync.checkpoint.memory.writing import FileInMemory
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey
from trainsync.checkpoint.save.places.base import SavePlace, SaveRecords
from trainsync.checkpoint.save.places.uploading import OpenSaveCheck
from trainsync.failpoints import failpoint
from trainsync.storage.errors import SecondWriterError, StorageError
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves.receipts import ParticipantFailure, Rescue

logger = logging.getLogger(__name__)

FINISH_SECONDS: Final = 60.0
"""For so long a part is written again where the store is away, and a restart waits for it."""

_MAX_ERROR: Final = 4096  # characters
_LOOK_SECONDS: Final = 2.0  # between two questions whether a save that is written has ended
_THREADS: Final = 8


def rescue(place: SavePlace, parts: Mapping[PartKey, KeptPart | None]) -> None:
    """Finish the parts of a process that has died, those of the newest step first; never raises.

    Args:
        place: continues the writer that has died.
        parts: that were begun and have not ended; None: it is not whole in memory.
    """
    # All are spoken of before the first is written: a restart waits for a word of each.
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda part: _say(place, part, kept=parts[part] is not None), parts))
    for part, kept in sorted(parts.items(), key=lambda item: -item[0].step):
        if kept is None:
            continue
        try:
            finish(place, part, kept)
        except SecondWriterError as error:  # a process that was started anew writes it
            _log(part, error)
            _say(place, part, kept=False)
        except Exception as error:  # noqa: BLE001 - the other parts are finished all the same
            _log(part, error)
            _fail(place, part, kept, error)


def finish(place: SavePlace, part: PartKey, kept: KeptPart) -> None:
    """Write the part's files from memory, and its receipt, unless the save lacks it no more.

    Raises:
        OSError, StorageError: it cannot be written, or is not in memory any more.
        ValueError: what is in memory is not what was kept.
    """
    started = time.monotonic()
    retry_limits = RetryLimits(started + FINISH_SECONDS)
    there = place.part(part.kind, part.step, part.participant, retry_limits)
    if not is_wanted(there.records, part):
        return
    there.claim()
    failpoint("rescue.finishing")
    (expected,) = kept.receipt.files
    with closing(FileInMemory(kept.file)) as memory:
        still_open = OpenSaveCheck(
            partial(has_ended, place.save(part.kind, part.step)), _LOOK_SECONDS
        )
        produce = partial(memory.produce, check=still_open.check)
        entries = there.write_state(expected.path, produce, expected.bytes)
    if entries[0] != expected:
        raise ValueError(f"{kept.file} has changed in memory")
    entries += there.write_small(kept.attachments)
    failpoint("rescue.written")
    replaces = there.claim()
    if not is_wanted(there.records, part):
        raise FileNotFoundError("the save has ended meanwhile")
    there.write_receipt(
        replace(
            kept.receipt,
            files=tuple(entries),
            seconds=kept.receipt.seconds + time.monotonic() - started,
            writer=there.writer,
            replaces=replaces,
            rescued=True,
        )
    )
    logger.warning(
        "the process of %s died: its part of %s %d was written from memory, %d bytes in %.1f s",
        *(part.participant, part.kind.value, part.step),
        *(expected.bytes, time.monotonic() - started),
    )


def is_wanted(save: SaveRecords, part: PartKey) -> bool:
    """Whether the save is open and lacks the part. Raises `OSError`, `StorageError`."""
    return not has_ended(save) and part.participant not in save.writers()


def has_ended(save: SaveRecords) -> bool:
    """Whether it has, also where its records are removed: the process that died is superseded.

    Raises `OSError`, `StorageError`.
    """
    return save.outcome() is not None or not save.is_there()


def _say(place: SavePlace, part: PartKey, *, kept: bool) -> None:
    """Say that the part's process has died, as far as that can be said."""
    participant = part.participant
    word = Rescue(component=participant.component, rank=participant.rank, kept=kept)
    try:
        save = place.save(part.kind, part.step)
        if is_wanted(save, part):
            save.write_rescue(word)
    except (OSError, StorageError) as error:
        _log(part, error)


def _fail(place: SavePlace, part: PartKey, kept: KeptPart, error: Exception) -> None:
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
