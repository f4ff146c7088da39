"""Deals out the items of a dataset, and knows which of them were trained.

The state is a part of the checkpoint (`CheckpointCoordinator.save`): what the saved model learned
from, and what was only taken. After a restart the latter is dealt out first, and what was trained
after the checkpoint comes again in its place, so that the surviving history has each item once.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trainsync.data.errors import DataExhaustedError, DataMismatchError, NotInFlightError

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_SETTINGS: Final = ("length", "epochs", "shuffle", "seed")
_COUNTS: Final = ("epoch", "position", "trained", "dropped")


@dataclass(frozen=True, order=True)
class Item:
    """One item in one epoch; ``dataset[item.index]`` is what to train."""

    epoch: int
    index: int


def order_of(length: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """The indices of a dataset's items in the order of one epoch."""
    if not shuffle:
        return np.arange(length)
    return np.random.default_rng((seed, epoch)).permutation(length)


class DataCursor:
    """Deals out ``(epoch, index)`` of a dataset, so that each is trained once.

    One process holds the cursor, mostly the driver, and gives it to each save::

        cursor = ctx.data_cursor(len(dataset), epochs=2, seed=1)    # goes on after a restart
        while not cursor.finished:
            items = cursor.take(64)              # in flight from now on
            ...                                  # answers to dataset[item.index], a training step
            cursor.trained(items)                # with the step that learned from them
            coordinator.save(step, model=model, optimizer=optimizer, data_cursor=cursor)

    Items may be trained in any order, and while others are in flight. Methods may be called from
    several threads.

    Args:
        length: items in the dataset.
        epochs: how often each is trained; None: without end.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and its number.

    Raises:
        ValueError: ``length`` or ``epochs`` is below 1.
    """

    def __init__(
        self, length: int, *, epochs: int | None = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        if length < 1:
            raise ValueError(
                f"a dataset of {length} items has nothing to train; expected 1 or more"
            )
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be 1 or more, or None for no end; got {epochs}")
        self.length: Final = length
        self.epochs: Final = epochs
        self.shuffle: Final = shuffle
        self.seed: Final = seed
        self._lock = threading.Lock()
        self._epoch = 0
        self._position = 0  # in the order of the epoch
        self._trained = 0
        self._dropped = 0
        self._again: deque[Item] = deque()  # taken before, to be dealt out first
        self._in_flight: dict[Item, None] = {}  # in the order in which they were taken
        self._order = self._order_of(0)

    # -- dealing out -----------------------------------------------------------------------

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items, in flight from now on; fewer at the end of the last epoch.

        Raises:
            ValueError: ``count`` is below 1.
            DataExhaustedError: none is left; says how many are in flight.
        """
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        with self._lock:
            taken: list[Item] = []
            while len(taken) < count and (item := self._next()) is not None:
                taken.append(item)
                self._in_flight[item] = None
            if not taken:
                raise DataExhaustedError(
                    f"all {self.epochs} epochs of {self.length} items were dealt out: "
                    f"{self._trained} are trained, {self._dropped} dropped, "
                    f"{len(self._in_flight)} in flight"
                )
        if len(taken) < count:
            logger.warning("the data ends: %d items were left of %d", len(taken), count)
        return taken

    def trained(self, items: Iterable[Item]) -> None:
        """The model has learned from these items: they are not dealt out again.

        Raises:
            NotInFlightError: one was never taken, or has ended before; none of them counts.
        """
        with self._lock:
            self._trained += self._end(items, "trained")

    def drop(self, items: Iterable[Item], reason: str) -> None:
        """These items are not trained, and not dealt out again, such as answers all alike.

        Args:
            reason: for people; logged.

        Raises:
            NotInFlightError: see `trained`.
        """
        with self._lock:
            count = self._end(items, "dropped")
            self._dropped += count
        logger.info("%d items are not trained: %s", count, reason)

    def give_back(self, items: Iterable[Item]) -> None:
        """These items are dealt out again, next, such as those of an explorer that was lost.

        Raises:
            NotInFlightError: see `trained`.
        """
        items = list(items)
        with self._lock:
            self._end(items, "given back")
            self._again.extend(items)

    # -- looking ---------------------------------------------------------------------------

    @property
    def in_flight(self) -> tuple[Item, ...]:
        """Items that were taken, and neither trained, dropped nor given back."""
        with self._lock:
            return tuple(self._in_flight)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to be taken; items may be in flight, and given back."""
        with self._lock:
            return not self._again and self._at_end()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to be taken, and nothing is in flight."""
        with self._lock:
            return not (self._in_flight or self._again) and self._at_end()

    def metrics(self) -> dict[str, float]:
        """Counts for `RunContext.report`: ``data_epoch``, ``data_trained``, …"""
        with self._lock:
            return {
                "data_epoch": float(self._epoch),
                "data_trained": float(self._trained),
                "data_dropped": float(self._dropped),
                "data_in_flight": float(len(self._in_flight)),
            }

    # -- the state -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from: numbers, strings and lists, for JSON too."""
        with self._lock:
            return {
                "format": _FORMAT,
                **self._settings(),
                "epoch": self._epoch,
                "position": self._position,
                "trained": self._trained,
                "dropped": self._dropped,
                "in_flight": [
                    [item.epoch, item.index] for item in (*self._in_flight, *self._again)
                ],
            }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a saved state: what was in flight is dealt out first, in its order.

        Raises:
            DataMismatchError: the state is of another dataset or of other settings, or is no state
                of a cursor; nothing changes.
        """
        in_flight = _checked(state)
        saved = {name: state[name] for name in _SETTINGS}
        for name, here in self._settings().items():
            if name != "epochs" and saved[name] != here:
                raise DataMismatchError(
                    f"the saved cursor has {name} {saved[name]}, this one {here}: its items would "
                    "be others. Give the dataset and the settings that the run began with, or "
                    "start a new run"
                )
        with self._lock:
            self._epoch, self._position = state["epoch"], state["position"]
            self._trained, self._dropped = state["trained"], state["dropped"]
            self._again, self._in_flight = deque(in_flight), {}
            self._order = self._order_of(self._epoch)
            left = "nothing is left" if self._at_end() else f"epoch {self._epoch} goes on"
        logger.info(
            "data: %d items are trained, %d come again that were in flight; %s",
            state["trained"],
            len(in_flight),
            left,
        )

    # -- inside, with the lock held --------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _order_of(self, epoch: int) -> np.ndarray[Any, Any]:
        return order_of(self.length, self.shuffle, self.seed, epoch)

    def _at_end(self) -> bool:
        return self.epochs is not None and self._epoch >= self.epochs

    def _next(self) -> Item | None:
        if self._again:
            return self._again.popleft()
        if self._at_end():
            return None
        item = Item(self._epoch, int(self._order[self._position]))
        self._position += 1
        if self._position == self.length:
            self._epoch, self._position = self._epoch + 1, 0
            logger.info("epoch %d is dealt out", self._epoch - 1)
            if not self._at_end():
                self._order = self._order_of(self._epoch)
        return item

    def _end(self, items: Iterable[Item], how: str) -> int:
        ended = list(items)
        twice = len(set(ended)) < len(ended)
        for item in ended:
            if twice or item not in self._in_flight:
                raise NotInFlightError(
                    f"{how}: a repeated item in one call, {ended}"
                    if twice
                    else f"{item} cannot be {how}: it was never taken, or has ended before"
                )
        for item in ended:
            del self._in_flight[item]
        return len(ended)


def _checked(state: Mapping[str, Any]) -> list[Item]:
    """The items in flight of a state that is whole.

    Raises:
        DataMismatchError: it is no state of a cursor.
    """
    needed = {"format", "in_flight", *_SETTINGS, *_COUNTS}
    missing = sorted(needed - set(state))
    if missing or state["format"] != _FORMAT:
        raise DataMismatchError(
            f"this is no state of a data cursor of format {_FORMAT}: "
            + (f"it lacks {', '.join(missing)}" if missing else f"its format is {state['format']}")
        )
    for name in _COUNTS:
        if not isinstance(state[name], int) or state[name] < 0:
            raise DataMismatchError(f"{name} of the saved cursor is {state[name]!r}, not a count")
    if state["position"] >= max(state["length"], 1):
        raise DataMismatchError(
            f"position {state['position']} of the saved cursor is beyond its "
            f"{state['length']} items"
        )
    return [Item(epoch, index) for epoch, index in state["in_flight"]]
