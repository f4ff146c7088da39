"""Writes parts of other ranks, of which copies are in this pod, when a restart asks for them.

The ranks are gone with their pods, and so is what would have written their parts there. That they
are gone is not known here, but where the next incarnation begins: there copies are asked for, once
no process of the one before lives (see `waiting`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from trainsync.checkpoint.rescue.finish import has_ended, is_wanted, log_not_written, rescue
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, PartTold
from trainsync.checkpoint.save.places.base import Place
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 600.0
"""For so long copies are offered: a new job may be started after a pause."""

_LOOK_SECONDS: Final = 0.25
_LONGEST_LOOK_SECONDS: Final = 1.0

Copies = Mapping[PartKey, KeptPart]


def rescue_all(place_of: Callable[[str], Place], writer: str, told: Iterable[PartTold]) -> None:
    """Finish the parts of a rank that has died, and offer the copies that it had; never raises.

    Args:
        place_of: the place in which a `Place.writer` goes on.
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
    for thread in threads:
        thread.join()  # each of their parts has a deadline


def offer(
    place: Place,
    copies: Copies,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write the parts of which copies are wanted, until their saves have ended; never raises.

    Args:
        place: continues the writer whose parts these are.
    """
    left = dict(copies)
    until, pause = clock() + _WAIT_SECONDS, _LOOK_SECONDS
    while left and clock() < until:
        due = _due(place, left)
        left = {part: kept for part, kept in left.items() if part not in due}
        needed = {part: kept for part, kept in due.items() if _is_needed(place, part)}
        if needed:
            rescue(place, needed)
        elif left:
            sleep(pause)
            pause = min(1.1 * pause, _LONGEST_LOOK_SECONDS)


def _due(place: Place, copies: Copies) -> Copies:
    """Those of saves of which copies are wanted, or that have ended."""
    found = set()
    for kind, step in {(part.kind, part.step) for part in copies}:
        save = place.save(kind, step)
        try:
            if save.are_copies_wanted() or has_ended(save):
                found.add((kind, step))
        except (OSError, StorageError) as error:  # the next look tries again
            logger.debug("whether copies of %s %d are wanted: %s", kind.value, step, error)
    return {part: kept for part, kept in copies.items() if (part.kind, part.step) in found}


def _is_needed(place: Place, part: PartKey) -> bool:
    """Whether the save is open, and nothing is heard of the part's process, nor of what outlives
    that."""
    save = place.save(part.kind, part.step)
    try:
        heard = any(word.participant == part.participant for word in save.rescues())
        return not heard and is_wanted(save, part)
    except (OSError, StorageError) as error:
        log_not_written(part, error)
        return False
