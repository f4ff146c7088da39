"""Messages between the pace scheduler and the trainer and explorers of a run: plain data."""

from dataclasses import dataclass
from typing import Any

from trainsync.data.places import TrainedPlaces
from trainsync.weights.pacing.policy import SyncPolicy


@dataclass(frozen=True)
class Turn:
    """Leave to make one batch with ``version``; ``number`` is that of `PaceScheduler`.

    ``restarts`` counts those of the trainers before it; ``place`` is the batch's place in the data,
    with a `BatchCursor`, else -1.
    """

    version: int
    number: int
    restarts: int = 0
    place: int = -1


@dataclass(frozen=True)
class Batch:
    """A batch that an explorer made; the run decides what its ``payload`` holds.

    ``place``: see `Turn`.
    """

    explorer: str
    version: int
    number: int
    payload: Any
    place: int = -1

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the batch among those that are queued."""
        return self.explorer, self.number


@dataclass(frozen=True)
class TrainerPlan:
    """The trainer's settings, sent with every question; a step trains on ``batches`` batches.

    With style ``fixed`` a step trains on the shares of all explorers, however many they are.
    ``keeps_batches``: see `TrainerPace`. ``trained``: of the data, with a `BatchCursor`.
    """

    policy: SyncPolicy
    batches: int = 1
    keeps_batches: bool = False
    trained: TrainedPlaces | None = None


@dataclass(frozen=True)
class TrainerOrder:
    """An order to the trainer; nothing set means: wait, ``seconds`` at most, and ask again."""

    publish: bool = False
    batches: tuple[Batch, ...] = ()
    give_up: frozenset[str] = frozenset()
    seconds: float = 0.0
