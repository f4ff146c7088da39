"""What can go wrong on the trainers' side of publishing weights, by name."""

from trainsync.weights.errors import WeightsError


class GatherFailedError(WeightsError):
    """A weight could not be gathered from the trainer ranks, or not in time."""


class TrainerRankFailedError(WeightsError):
    """Another trainer rank could not do its part, or is gone; the message says which, and why."""


class EngineUpdateError(WeightsError):
    """An inference engine did not take new weights, and must not be used before it has."""
