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


class Probes:
    """The trainer's log-probabilities at every version, to compare the explorers' with."""

    def __init__(self) -> None:
        self._expected: dict[int, torch.Tensor] = {}

    def expect(self, version: int, logprobs: torch.Tensor) -> None:
        """The trainer publishes ``version``, and computes ``logprobs`` with it."""
        self._expected[version] = logprobs

    def check(self, probes: Iterable[Probe]) -> float:
        """Compare every explorer's probe with the trainer's at the same version.

        Returns:
            The largest absolute difference.

        Raises:
            WeightsDifferError: An explorer serves a version that was not published, or is above
                `PROBE_TOLERANCE`.
        """
        largest = 0.0
        for probe in probes:
            if probe.version not in self._expected:
                raise WeightsDifferError(
                    f"explorer {probe.explorer} serves version {probe.version}, which this attempt"
                    " did not publish"
                )
            expected = self._expected[probe.version]
            difference = (probe.logprobs - expected).abs().max().item()
            # Written so that a NaN fails too.
            if not difference <= PROBE_TOLERANCE:
                raise WeightsDifferError(
                    f"explorer {probe.explorer} at version {probe.version}: log-probabilities of"
                    f" the probe batch differ from the trainer's by {difference:g}, expected at"
                    f" most {PROBE_TOLERANCE:g}"
                )
            largest = max(largest, difference)
        return largest
