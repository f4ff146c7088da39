"""Iterates a dataloader, and knows which of its batches were trained.

For loops where several batches are in flight, or end in another order than they began. A loop that
trains each batch before it takes the next needs none of this: give the dataloader itself to
`CheckpointCoordinator.save`.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from trainsync.data.errors import DataMismatchError, NotInFlightError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FORMAT: Final = 1


@dataclass(frozen=True)
class Batch(Generic[T]):
    """A batch of the loader, and its number: from 0 in each epoch."""

    epoch: int
    number: int
    data: T


class TrackedLoader(Generic[T]):
    """One pass over a dataloader after another, each batch of which is trained once.

    ::

        loader = TrackedLoader(StatefulDataLoader(dataset, batch_size=8))
        for batch in loader.batches():                     # the rest of this epoch
            ...                                            # batch.data
            loader.trained(batch)
            coordinator.save(step, model=model, optimizer=optimizer, dataloader=loader)

    The state names the place of the loader before the oldest batch in flight, and which batches
    after it were trained. After a restart the loader goes on from that place, and what was trained
    is passed over. A loader without ``state_dict()`` and ``load_state_dict()`` is read anew from
    the beginning of the epoch; it must give equal batches each time.

    Args:
        loader: ``torchdata``'s StatefulDataLoader (verl's ``train_dataloader`` is one), or anything
            that can be iterated again. ``set_epoch`` of its sampler, or its own, is called with the
            epoch's number before each pass.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        if isinstance(loader, Iterator):
            raise TypeError(
                f"a {type(loader).__name__} can be read only once, so a restart would lose what "
                "was in flight; expected a dataloader, a list, or another that can be iterated anew"
            )
        self._loader = loader
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._length = len(loader) if isinstance(loader, Sized) else None
        self._lock = threading.Lock()
        self._restore: Any = None  # to be loaded into the loader before its next pass
        self._epoch = 0
        self._passing = False  # a loop over the epoch has begun
        self._ended = False  # it has reached the end
        self._first = 0  # the batch that the pass begins with
        self._next = 0
        self._place: Any = None  # the loader's state before the next batch
        self._before: dict[int, Any] = {}  # batch in flight → the loader's state before it
        self._done: set[int] = set()  # trained, though an older one is in flight

    @property
    def epoch(self) -> int:
        """Number of the pass that goes on, or comes next."""
        return self._epoch

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the epoch's batches that were dealt out and not trained."""
        with self._lock:
            return tuple(sorted(self._before))

    def batches(self) -> Iterator[Batch[T]]:
        """The rest of this epoch; with the next call the next epoch, once all are trained.

        Raises:
            NotInFlightError: batches of the loop before are not trained.
            DataMismatchError: the loader gives fewer batches than were trained, or none.
        """
        with self._lock:
            if self._before:
                raise NotInFlightError(
                    f"batches {sorted(self._before)} of epoch {self._epoch} are in flight; train "
                    "them before the next loop"
                )
            if self._ended:
                self._begin(self._epoch + 1)
            elif self._passing:  # the loop before was left
                self._first, self._restore = self._next, self._place
            self._passing = True
        return self._pass()

    def trained(self, batch: Batch[T]) -> None:
        """The model has learned from this batch: it is not dealt out again.

        Raises:
            NotInFlightError: it is not in flight.
        """
        with self._lock:
            if batch.epoch != self._epoch or batch.number not in self._before:
                raise NotInFlightError(
                    f"batch {batch.number} of epoch {batch.epoch} is not in flight: it was trained "
                    "before, or is of another epoch"
                )
            del self._before[batch.number]
            self._done.add(batch.number)
            self._prune()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from; holds the loader's own state as it is."""
        with self._lock:
            oldest = self._oldest()
            place = self._before.get(oldest, self._place)
            return {
                "format": _FORMAT,
                "length": self._length,
                "epoch": self._epoch,
                "number": oldest,
                "trained": sorted(self._done),
                "ended": self._ended and not self._before,
                "loader": place if self._stateful else None,
            }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a saved state.

        Raises:
            DataMismatchError: it is of a loader of another length or kind, or no state of one;
                nothing changes.
        """
        needed = {"format", "length", "epoch", "number", "trained", "ended", "loader"}
        if not needed <= set(state) or state["format"] != _FORMAT:
            raise DataMismatchError(
                f"this is no state of a TrackedLoader of format {_FORMAT}; expected "
                + ", ".join(sorted(needed))
            )
        if state["length"] != self._length:
            raise DataMismatchError(
                f"the saved loader has {state['length']} batches an epoch, this one "
                f"{self._length}: its batches would be others. Give the dataset and the batch "
                "size that the run began with, or start a new run"
            )
        if (state["loader"] is not None) != self._stateful and state["number"]:
            raise DataMismatchError(
                "the loader's state was saved, and this loader takes none"
                if not self._stateful
                else "the loader's own state was not saved: it had no state_dict()"
            )
        with self._lock:
            self._begin(state["epoch"])
            self._ended = state["ended"]
            self._first = self._next = state["number"]
            self._done = set(state["trained"])
            self._restore = self._place = state["loader"]

    # -- inside ----------------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._passing = self._ended = False
        self._first = self._next = 0
        self._place = None
        self._before, self._done = {}, set()

    def _oldest(self) -> int:
        return min(self._before, default=self._next)

    def _prune(self) -> None:
        self._done = {number for number in self._done if number > self._oldest()}

    def _pass(self) -> Iterator[Batch[T]]:
        epoch, first = self._epoch, self._first
        self._set_epoch(epoch)
        number = self._rewind(first)
        for data in self._loader:
            after = self._now()
            with self._lock:
                in_flight = number >= first and number not in self._done
                if in_flight:
                    self._before[number] = self._place
                self._place, self._next = after, max(self._next, number + 1)
                self._prune()
            if in_flight:
                yield Batch(epoch, number, data)
            number += 1
        if number < first:
            raise DataMismatchError(
                f"epoch {epoch} gave {number} batches, and {first} were trained before: the data "
                "are others than those of the saved state"
            )
        if not number:
            raise DataMismatchError(f"epoch {epoch} gave no batch: the loader is empty")
        with self._lock:
            self._ended, self._place = True, self._now()
        logger.info("epoch %d is dealt out: %d batches", epoch, number)

    def _rewind(self, first: int) -> int:
        """Restore the loader's state at the start of the pass, if there is one to restore; else the
        pass starts at batch 0.

        Returns:
            Number of the batch that it gives next.
        """
        restore, self._restore = self._restore, None
        if self._stateful and restore is not None:
            self._loader.load_state_dict(restore)  # type: ignore[attr-defined]
            self._place = restore
            return first
        self._place = self._now()
        return 0

    def _now(self) -> Any:
        return self._loader.state_dict() if self._stateful else None  # type: ignore[attr-defined]

    def _set_epoch(self, epoch: int) -> None:
        owners: tuple[Any, ...] = (self._loader, getattr(self._loader, "sampler", None))
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
