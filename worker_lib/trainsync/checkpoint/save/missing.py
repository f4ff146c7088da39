"""Logs what a save still misses, as far as the disk tells: its registration, or parts."""

import logging
import time
from collections.abc import Iterable
from typing import Final

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.api.spec import UNREGISTERED_WARNING_SECONDS
from trainsync.checkpoint.errors import NotRegisteredError
from trainsync.checkpoint.save.places.base import SavePlace, SaveRecords
from trainsync.storage.errors import StorageError
from trainsync.storage.saves import receipts

logger = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 60.0
_NAMED: Final = 5


def how_to_register(kind: SaveKind, step: int) -> str:
    """The call that is missing."""
    return (
        f"expected one process to call coordinator.register({step}, {kind.value}_participants=...)"
        ", or register_and_monitor, with all participants"
    )


class MissingReport:
    """Logs what one save misses, while a commit is waited for.

    Args:
        place: where the saves of this process's attempt go.
        after: seconds until the first log.
    """

    def __init__(
        self,
        place: SavePlace,
        kind: SaveKind,
        step: int,
        after: float = UNREGISTERED_WARNING_SECONDS,
    ) -> None:
        self._place = place
        self._kind = kind
        self._step = step
        self._began = time.monotonic()
        self._next = self._began + after

    def log(self, state: SaveState, *, registers_here: bool) -> None:
        """Log what the save misses, ``after`` seconds into the wait and once a minute from then on.

        Args:
            state: the monitor's newest answer.
            registers_here: this process registers saves, and is not about to register this one:
                then no other process will.

        Raises:
            NotRegisteredError: the save is not registered, and no part of it is coming.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _AGAIN_SECONDS
        what = f"{self._kind.value} of step {self._step}"
        waited = f"after {now - self._began:.0f} s"
        try:
            if state is SaveState.UNKNOWN:
                self._not_registered(f"{what} is not registered {waited}", registers_here)
                return
            missing = missing_parts(self._records(self._kind))
        except (OSError, StorageError) as error:
            logger.warning("%s: the registration and receipts cannot be read: %s", what, error)
            return
        if missing:
            logger.warning("%s waits for %s, not written %s", what, named(missing), waited)
        else:
            logger.warning("%s is written, and not committed %s", what, waited)

    def _not_registered(self, sentence: str, registers_here: bool) -> None:
        other = {SaveKind.CHECKPOINT: SaveKind.STATE_DICT}.get(self._kind, SaveKind.CHECKPOINT)
        if self._records(other).registration() is not None:
            wanted = "True" if other is SaveKind.STATE_DICT else "False"
            sentence += (
                f", but the {other.value} of the step is: is_state_dict={wanted} waits for it"
            )
        newest = next(self._place.registered(self._kind), None)
        known = (
            "none is" if newest is None else f"the newest that is registered is of step {newest}"
        )
        text = f"{sentence} ({known}); {how_to_register(self._kind, self._step)}"
        if registers_here and not self._records(self._kind).is_there():
            raise NotRegisteredError(f"{text}; no part of the step is written")
        logger.warning("%s", text)

    def _records(self, kind: SaveKind) -> SaveRecords:
        return self._place.save(kind, self._step)


def missing_parts(save: SaveRecords) -> list[receipts.Participant]:
    """The registered participants that have written nothing yet.

    Raises:
        FileNotFoundError: the save is not registered any more.
        OSError, StorageError: the place.
    """
    registration = save.registration()
    if registration is None:
        raise FileNotFoundError("the registration is gone")
    return sorted(set(registration.participants).difference(save.writers()))


def named(participants: Iterable[receipts.Participant]) -> str:
    """The first of them, for people."""
    names = [str(participant) for participant in participants]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
