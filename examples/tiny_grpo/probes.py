"""The proof that the weights arrived: at one version, trainer and explorers compute the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # a demo reads the tolerance without loading torch
    from collections.abc import Iterable

    import torch

    from tiny_grpo.explorer import Probe

# Largest difference of two log-probabilities at equal version. Trainer and explorer compute in
# float32 on equal values: on one kind of machine the difference is 0, on two (a GPU and a CPU, say)
# sums are ordered differently, which moves a log-probability by some 1e-6. One optimizer step moves
# it by more than 1e-2, so weights of a neighbouring version would not pass. With bfloat16, whose
# 8 bits of mantissa move a logit of 8 by 3e-2, this could no longer tell two versions apart.
PROBE_TOLERANCE: Final = 1e-4


class WeightsDifferError(Exception):
    """An explorer does not hold the weights of the version that it should serve."""


def check_probes(version: int, expected: torch.Tensor, probes: Iterable[Probe]) -> float:
    """Compare every explorer's probe with the trainer's.

    Args:
        version: The version that the trainer has just published.
        expected: The trainer's log-probabilities at ``version``.

    Returns:
        The largest absolute difference.

    Raises:
        WeightsDifferError: An explorer serves another version, or is above `PROBE_TOLERANCE`.
    """
    largest = 0.0
    for probe in probes:
        if probe.version != version:
            raise WeightsDifferError(
                f"explorer {probe.explorer} serves version {probe.version}, expected {version}"
            )
        difference = (probe.logprobs - expected).abs().max().item()
        # Written so that a NaN fails too.
        if not difference <= PROBE_TOLERANCE:
            raise WeightsDifferError(
                f"explorer {probe.explorer} at version {version}: log-probabilities of the probe"
                f" batch differ from the trainer's by {difference:g}, expected at most"
                f" {PROBE_TOLERANCE:g}"
            )
        largest = max(largest, difference)
    return largest
