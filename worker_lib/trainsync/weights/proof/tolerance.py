"""Tolerances, from servers and trainers whose weights are known to be the same."""

import statistics
from collections.abc import Sequence
from typing import Final

from trainsync.weights.proof.comparing import Logprobs, clipped, minus, sizes
from trainsync.weights.proof.errors import ProofError
from trainsync.weights.proof.record import Tolerance

_TYPICAL: Final = 1.5  # times the largest median that was measured
_LARGEST: Final = 2.0  # times the largest rms, and the largest difference


def measured_tolerance(
    trainer: Sequence[Logprobs], server: Sequence[Logprobs], exact: Sequence[Logprobs] | None = None
) -> Tolerance:
    """The tolerance of a trainer and a kind of server, from versions that both have.

    Args:
        trainer: of each version, in order, the trainer's log-probabilities of canaries.
        server: the server's.
        exact: the same model's, computed in float32; None: the trainer computes in float32.

    Raises:
        ProofError: there are less than two versions.
    """
    if len(trainer) < 2:
        raise ProofError(f"{len(trainer)} versions were measured, expected two or more")
    found = [sizes(minus(s, t)) for s, t in zip(server, trainer, strict=True)]
    rounding = 0.0
    if exact is not None:
        errors = [minus(t, e) for t, e in zip(trainer, exact, strict=True)]
        pairs = zip(errors[1:], errors, strict=False)
        rounding = statistics.mean(sizes(clipped(minus(new, old)))[1] for new, old in pairs)
    return Tolerance(
        typical=_TYPICAL * max(median for median, _, _ in found),
        rms=_LARGEST * max(rms for _, rms, _ in found),
        largest=_LARGEST * max(largest for _, _, largest in found),
        trainer_rms=rounding,
    )
