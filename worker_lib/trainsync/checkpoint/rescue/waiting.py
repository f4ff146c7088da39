"""Lets a restart wait for parts that are written from memory after their processes died."""

import logging
import time
from collections.abc import Callable, Iterable
from itertools import islice, product
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.finish import FINISH_SECONDS
from trainsync.checkpoint.save.places.base import Place, SaveRecords
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 3.0
"""For what outlives a process to say that it does, or that the part is lost."""

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
    word of what outlives each process, such as one whose pod is gone, three seconds are waited; in
    all a minute.
    """
    began = clock()
    for place, kind in product(places, SaveKind):
        try:
            for step in islice(place.registered(kind), _STEPS):
                if _becomes_whole(place.save(kind, step), began, clock, sleep):
                    break
        except (OSError, StorageError) as error:
            logger.warning("parts that are written from memory are not awaited: %s", error)
    waited = clock() - began
    if waited > _ANSWER_SECONDS:
        logger.info("waited %.1f s for parts of processes that died", waited)


def _becomes_whole(
    save: SaveRecords, began: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Whether the save is committed, or has all of its parts, at last."""
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
        is_silent = not missing <= said.keys()
        waited = clock() - began
        if any(said.get(part) is False for part in missing):
            return False
        left = (_ANSWER_SECONDS if is_silent else FINISH_SECONDS) - waited
        if left <= 0:
            return False
        sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)
