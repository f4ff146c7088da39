"""Lets a restart wait for parts that are written from memory after their processes died."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.finish import FINISH_SECONDS
from trainsync.checkpoint.save.places.base import Place, SaveRecords
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 4.0
"""For what outlives a process, or its neighbour, to say that it does, or that the part is lost."""

_NEIGHBOUR_SECONDS: Final = 1.5
"""Neighbours are asked for parts of which nothing is heard for so long."""

_LOOK_SECONDS: Final = 0.02
_LONGEST_LOOK_SECONDS: Final = 0.5
_STEPS: Final = 3
"""The newest registered steps of a kind that are looked at: more are not in flight."""


def await_rescue(
    places: Iterable[Place],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the newest save of each kind that can still become whole is; never raises.

    To be called once no process of the places' incarnations lives any more. Of a save without the
    word of what outlives each process, such as one whose pod is gone, copies with neighbours are
    asked for, and four seconds are waited; in all a minute.
    """
    wait = _Wait(clock, sleep)
    groups = [_in_flight(place, kind) for place, kind in product(places, SaveKind)]
    for number, saves in enumerate(groups):
        later = [save for group in groups[number + 1 :] for save in group]
        try:
            for at, save in enumerate(saves):
                if wait.becomes_whole(save, [*saves[at:], *later]):
                    break
        except (OSError, StorageError) as error:  # older saves would take as long
            _log(error)
    if wait.seconds > _ANSWER_SECONDS:
        logger.info("waited %.1f s for parts of processes that died", wait.seconds)


def _in_flight(place: Place, kind: SaveKind) -> list[SaveRecords]:
    """The newest saves, the last one first."""
    try:
        return [place.save(kind, step) for step in islice(place.registered(kind), _STEPS)]
    except (OSError, StorageError) as error:
        _log(error)
        return []


def _log(error: Exception) -> None:
    logger.warning("parts that are written from memory are not awaited: %s", error)


class _Wait:
    """One wait for all saves."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._began = clock()

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self._clock() - self._began

    def becomes_whole(self, save: SaveRecords, asked_for: Sequence[SaveRecords]) -> bool:
        """Whether the save is committed, or has all of its parts, at last.

        Args:
            asked_for: copies are wanted of these, too: an older save may be whole in memory where
                this one is not.

        Raises:
            OSError, StorageError: its records cannot be read.
        """
        pause, asked = _LOOK_SECONDS, False
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
            is_silent = not missing <= said.keys()
            if any(said.get(part) is False for part in missing):
                return False
            if is_silent and not asked and self.seconds >= _NEIGHBOUR_SECONDS:
                _ask_neighbours(asked_for)
                asked = True
            left = (_ANSWER_SECONDS if is_silent else FINISH_SECONDS) - self.seconds
            if left <= 0:
                return False
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)


def _ask_neighbours(saves: Sequence[SaveRecords]) -> None:
    for save in saves:
        try:
            if save.outcome() is None and save.is_there():
                save.want_copies()
        except FileNotFoundError:  # it has ended meanwhile
            continue
