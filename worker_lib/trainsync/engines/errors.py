"""Errors that trainer ranks raise while they publish weights."""

from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.weights.errors import WeightsError


class GatherFailedError(WeightsError):
    """A weight could not be gathered from the trainer ranks, or not in time."""


class TrainerRankFailedError(WeightsError, PeerError):
    """Another trainer rank failed or is gone; the message names the rank and the cause."""


class TrainerRankLostError(TrainerRankFailedError, PeerLostError):
    """Another trainer rank's process has ended or is stopped."""


class EngineUpdateError(WeightsError):
    """An inference engine failed to load new weights; do not use the engine before a load
    succeeds."""
