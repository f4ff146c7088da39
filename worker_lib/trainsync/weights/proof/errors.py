"""Why a version has no proof."""

from trainsync.weights.errors import WeightsError


class ProofError(WeightsError):
    """Canaries, or log-probabilities of theirs, that nothing can be compared with."""
