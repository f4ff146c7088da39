"""Batches of a dataset by their place in its order: any process knows the items of a place.

Nothing is dealt out: what is left follows from the places that are trained and those that are on
their way. So batches that outlive their trainers are neither lost nor trained twice.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from trainsync.data.cursor import Item, order_of
from trainsync.data.errors import DataMismatchError, NotInFlightError

_FORMAT: Final = "batches 1"
_SETTINGS: Final = ("length", "batch_size", "epochs", "shuffle", "seed")

_order_of = lru_cache(maxsize=2)(order_of)


@dataclass(frozen=True)
class BatchOrder:
    """The batches of a dataset, epoch after epoch; a batch may reach into the next epoch.

    Args:
        length: items in the dataset.
        batch_size: items of a batch; the last one may have fewer.
        epochs: how often each item is trained; None: without end.
        shuffle, seed: as of `DataCursor`, whose order this is.

    Raises:
        ValueError: ``length``, ``batch_size`` or ``epochs`` is below 1.
    """

    length: int
    batch_size: int
    epochs: int | None = 1
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check."""
        for name in ("length", "batch_size", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")

    @property
    def places(self) -> int | None:
        """How many batches there are; None: without end."""
        return None if self.epochs is None else -(-self.length * self.epochs // self.batch_size)

    def items(self, place: int) -> list[Item]:
        """The items of the batch at ``place``, from 0 on.

        Raises:
            ValueError: there is no such place.
        """
        if place < 0 or (self.places is not None and place >= self.places):
            raise ValueError(f"there is no place {place}; expected 0 to {self.places} exclusive")
        first = place * self.batch_size
        end = first + self.batch_size
        if self.epochs is not None:
            end = min(end, self.length * self.epochs)
        return [self._item(*divmod(number, self.length)) for number in range(first, end)]

    def _item(self, epoch: int, position: int) -> Item:
        return Item(epoch, int(_order_of(self.length, self.shuffle, self.seed, epoch)[position]))


@dataclass(frozen=True)
class TrainedPlaces:
    """The places that were trained: all ``below`` one, and some ``above``, of ``most`` in all."""

    below: int = 0
    above: frozenset[int] = frozenset()
    most: int | None = None

    def __contains__(self, place: int) -> bool:
        """Whether this place was trained."""
        return place < self.below or place in self.above

    def __len__(self) -> int:
        """How many were trained."""
        return self.below + len(self.above)

    def also(self, places: Iterable[int]) -> "TrainedPlaces":
        """These, and those."""
        below, above = self.below, {*self.above, *(p for p in places if p >= self.below)}
        while below in above:
            above.remove(below)
            below += 1
        return TrainedPlaces(below, frozenset(above), self.most)

    def first_left(self, held: Collection[int]) -> int | None:
        """The first place that is neither trained nor ``held``; None when there is none."""
        place = self.below
        while place in self.above or place in held:
            place += 1
        return place if self.most is None or place < self.most else None


class BatchCursor:
    """Which batches of a dataset were trained, for a pace whose turns name places of the data.

    One process holds the cursor, mostly the driver. Explorers have its ``order``::

        cursor = ctx.batch_cursor(len(dataset), batch_size=8, epochs=2)   # goes on after a restart
        pace = ctx.pace_trainer(publish, step=start, cursor=cursor)
        while not cursor.finished:
            batches = pace.next_batches()
            cursor.trained(batch.place for batch in batches)      # with the step that learns from
            ...                                                   # them; save(data_cursor=cursor)
            pace.trained(step)

        for turn in pace:                                         # an explorer
            items = order.items(turn.place)

    Methods may be called from several threads.
    """

    def __init__(self, order: BatchOrder) -> None:
        self.order: Final = order
        self._lock = threading.Lock()
        self._done = TrainedPlaces(most=order.places)

    @property
    def done(self) -> TrainedPlaces:
        """The places that were trained."""
        return self._done

    @property
    def finished(self) -> bool:
        """Whether every batch of every epoch was trained."""
        return self.order.places is not None and len(self._done) >= self.order.places

    def trained(self, places: Iterable[int]) -> None:
        """The model has learned from the batches at these places.

        Raises:
            NotInFlightError: one was trained before, is none, or comes twice; none of them counts.
        """
        new = list(places)
        with self._lock:
            most = self.order.places
            for place in new:
                if place in self._done or new.count(place) > 1 or (most and place >= most):
                    raise NotInFlightError(
                        f"place {place} cannot be trained: it was trained before, or there is none"
                    )
            self._done = self._done.also(new)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from: numbers, strings and lists, for JSON too."""
        done = self._done
        return {
            "format": _FORMAT,
            **{name: getattr(self.order, name) for name in _SETTINGS},
            "below": done.below,
            "above": sorted(done.above),
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a saved state.

        Raises:
            DataMismatchError: the state is of another dataset or of other settings, or is no state
                of a cursor of batches; nothing changes.
        """
        missing = sorted({"format", "below", "above", *_SETTINGS} - set(state))
        if missing or state["format"] != _FORMAT:
            raise DataMismatchError(
                f"this is no state of a cursor of batches, of format {_FORMAT!r}"
                + (f": it lacks {', '.join(missing)}" if missing else "")
            )
        for name in _SETTINGS:
            if state[name] != (here := getattr(self.order, name)):
                raise DataMismatchError(
                    f"the saved cursor has {name} {state[name]}, this one {here}: its batches "
                    "would be others. Give the dataset and the settings that the run began with, "
                    "or start a new run"
                )
        with self._lock:
            self._done = TrainedPlaces(state["below"], most=self.order.places).also(state["above"])
