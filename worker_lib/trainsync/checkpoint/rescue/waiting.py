"""Lets a restart wait for parts that are written from memory after their processes died."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.finish import FINISH_SECONDS
from trainsync.checkpoint.save.places.base import SavePlace, SaveRecords
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 3.0
"""For what outlives a process to say that it does, or that the part is lost."""

_ASK_SECONDS: Final = 1.5
"""Neighbours are asked for parts of which nothing is heard for so long."""

_NEIGHBOUR_SECONDS: Final = 4.0
"""Where neighbours are asked, for any of these to say so."""

_LOOK_SECONDS: Final = 0.02
_LONGEST_LOOK_SECONDS: Final = 0.5
_STEPS: Final = 3
"""The newest registered steps of a kind that are looked at: more are not in flight."""


def await_rescue(
    places: Iterable[SavePlace],
    *,
    copies: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the newest save of each kind that can still become whole is; never raises.

    To be called once no process of the places' incarnations lives any more. Of a save without the
    word of what outlives each process, such as one whose pod is gone, three seconds are waited, or
    four with ``copies``; in all a minute.

    Args:
        copies: processes have copies of one another's parts, which are then asked for.
    """
    wait = _Wait(list(places), copies, clock, sleep)
    for place, kind in product(wait.places, SaveKind):
        try:
            for save in _in_flight(place, kind):
                if wait.becomes_whole(save):
                    break
        except (OSError, StorageError) as error:  # older saves would take as long
            logger.warning("parts that are written from memory are not awaited: %s", error)
    if wait.seconds > _ANSWER_SECONDS:
        logger.info("waited %.1f s for parts of processes that died", wait.seconds)


def _in_flight(place: SavePlace, kind: SaveKind) -> Iterator[SaveRecords]:
    """The newest saves, the last one first."""
    for step in islice(place.registered(kind), _STEPS):
        yield place.save(kind, step)


class _Wait:
    """One wait for all saves."""

    def __init__(
        self,
        places: list[SavePlace],
        copies: bool,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.places: Final = places
        self._silence = _NEIGHBOUR_SECONDS if copies else _ANSWER_SECONDS
        self._asks = copies
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self._clock() - self._began

    def becomes_whole(self, save: SaveRecords) -> bool:
        """Whether the save is committed, or has all of its parts, at last.

        Raises:
            OSError, StorageError: its records cannot be read.
        """
        pause = _LOOK_SECONDS
        while True:
            outcome = save.outcome()
            if outcome is not None:
                return outcome.error is None
            registration = save.registration()
            if registration is None or save.has_failed():
                return False  # it is being removed, or will be aborted
            missing = set(registration.participants).difference(save.writers())
            if not missing:
                return True
            said = {rescue.participant: rescue.kept for rescue in save.rescues()}
            if any(said.get(part) is False for part in missing):
                return False
            is_silent = not missing <= said.keys()
            if is_silent and self._asks and self.seconds >= _ASK_SECONDS:
                self._asks = False
                self._ask_neighbours()
            left = (self._silence if is_silent else FINISH_SECONDS) - self.seconds
            if left <= 0:
                return False
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)

    def _ask_neighbours(self) -> None:
        """Ask for copies of all saves: an older one may be whole in memory where the newest is
        not."""
        for place, kind in product(self.places, SaveKind):
            try:
                for save in _in_flight(place, kind):
                    if save.outcome() is None and save.is_there():
                        save.want_copies()
            except (OSError, StorageError) as error:  # it may have ended meanwhile
                logger.warning("copies of a %s are not asked for: %s", kind.value, error)
