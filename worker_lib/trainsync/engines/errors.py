"""What can go wrong on the trainers' side of publishing weights, by name."""

from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.weights.errors import WeightsError


class GatherFailedError(WeightsError):
    """A weight could not be gathered from the trainer ranks, or not in time."""


class TrainerRankFailedError(WeightsError, PeerError):
    """Another trainer rank could not do its part, or is gone; the message says which, and why."""


class TrainerRankLostError(TrainerRankFailedError, PeerLostError):
    """Another trainer rank has ended, or its process does not run."""


class EngineUpdateError(WeightsError):
    """An inference engine did not take new weights, and must not be used before it has."""
