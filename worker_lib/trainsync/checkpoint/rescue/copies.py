"""Writes parts of other ranks, of which copies are in this pod, when a restart asks for them.

The ranks are gone with their pods, and so is what would have written their parts there. That they
are gone is not known here, but where the next incarnation begins: there copies are asked for, once
no process of the one before lives (see `waiting`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from trainsync.checkpoint.rescue.finish import has_ended, is_wanted, rescue
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, PartTold
from trainsync.checkpoint.save.places.base import SavePlace
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 600.0
"""For so long copies are offered: a new job may be started after a pause."""

_LOG_SECONDS: Final = 15.0
"""For so long an offer keeps the log of the rank open, which a pipe's reader may wait for."""

_LOOK_SECONDS: Final = 0.25
_LONGEST_LOOK_SECONDS: Final = 1.0
_LOOKS_PER_END: Final = 10

Copies = Mapping[PartKey, KeptPart]


def rescue_all(place_of: Callable[[str], SavePlace], writer: str, told: Iterable[PartTold]) -> None:
    """Finish the parts of a rank that has died, and offer the copies that it had; never raises.

    Args:
        place_of: the place in which a `SavePlace.writer` goes on.
        writer: of the rank.
        told: what has not ended.
    """
    own: dict[PartKey, KeptPart | None] = {}
    copies: dict[str, dict[PartKey, KeptPart]] = {}
    for said in told:
        if said.copied_from is None:
            own[said.part] = said.kept
        elif said.kept is not None:
            copies.setdefault(said.copied_from, {})[said.part] = said.kept
    # Beside one another: a restart waits for a word of each part for a few seconds.
    threads = [threading.Thread(target=rescue, args=(place_of(writer), own))]
    threads += [
        threading.Thread(target=offer, args=(place_of(other), of_other))
        for other, of_other in copies.items()
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _LOG_SECONDS
    for thread in threads:  # each of their parts has a deadline
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads[1:]):
        threads[0].join()
        _leave_log()
    for thread in threads:
        thread.join()


def _leave_log() -> None:
    """Let go of the rank's standard error: from now on receipts alone tell of what is written."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)


def offer(
    place: SavePlace,
    copies: Copies,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the parts of which copies are wanted, until their saves have ended; never raises.

    Args:
        place: continues the writer whose parts these are.
    """
    left = dict(copies)
    began, looks, pause = clock(), 0, _LOOK_SECONDS
    while left and clock() < began + _WAIT_SECONDS:
        due, over = _due(place, left, looks_for_end=looks % _LOOKS_PER_END == 0)
        rescue(place, due)
        left = {part: kept for part, kept in left.items() if part not in {*due, *over}}
        if left and not due:
            sleep(pause)
            pause = min(1.1 * pause, _LONGEST_LOOK_SECONDS)
        looks += 1


def _due(place: SavePlace, copies: Copies, *, looks_for_end: bool) -> tuple[Copies, set[PartKey]]:
    """The parts to write now, and those that nothing needs any more.

    Args:
        looks_for_end: whether to look for the end of saves of which no copies are wanted, which
            takes three requests more in a bucket.
    """
    due: dict[PartKey, KeptPart] = {}
    over: set[PartKey] = set()
    for kind, step in sorted({(part.kind, part.step) for part in copies}, reverse=True):
        save = place.save(kind, step)
        parts = [part for part in copies if (part.kind, part.step) == (kind, step)]
        try:
            if not save.are_copies_wanted():
                if looks_for_end and has_ended(save):
                    over.update(parts)
                continue
            for part in parts:
                # What is heard of is written by what outlives its process, or is lost.
                if save.has_rescue(part.participant) or not is_wanted(save, part):
                    over.add(part)
                else:
                    due[part] = copies[part]
        except (OSError, StorageError) as error:  # the next look tries again
            logger.debug("whether copies of %s %d are wanted: %s", kind.value, step, error)
    return due, over
