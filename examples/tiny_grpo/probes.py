"""Proves that the weights arrived: at one version, trainer and explorers compute equal values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the demo imports the tolerance without torch
    from collections.abc import Iterable

    import torch

    from tiny_grpo.explorer import Probe

# Largest difference of two log-probabilities at equal version. Trainer and explorer compute in
# float32 on equal values. On one kind of machine the difference is 0; on two (such as a GPU and a
# CPU) sums are ordered differently, which changes a log-probability by about 1e-6. One optimizer
# step changes it by more than 1e-2, so weights of a neighbouring version fail the check. The check
# needs float32: bfloat16 has 8 bits of mantissa, which changes a logit of 8 by 3e-2.
PROBE_TOLERANCE: Final = 1e-4


class WeightsDifferError(Exception):
    """An explorer's weights are not those of its version."""


class Probes:
    """The trainer's log-probabilities at every version, for comparison with the explorers'."""

    def __init__(self) -> None:
        self._expected: dict[int, torch.Tensor] = {}

    def expect(self, version: int, logprobs: torch.Tensor) -> None:
        """Record the trainer's ``logprobs`` under ``version``."""
        self._expected[version] = logprobs

    def check(self, probes: Iterable[Probe]) -> float:
        """Compare every explorer's probe with the trainer's at the same version.

        Returns:
            The largest absolute difference.

        Raises:
            WeightsDifferError: An explorer's version was not published, or the difference is above
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
            # `not <=`: a NaN fails too.
            if not difference <= PROBE_TOLERANCE:
                raise WeightsDifferError(
                    f"explorer {probe.explorer} at version {probe.version}: log-probabilities of"
                    f" the probe batch differ from the trainer's by {difference:g}, expected at"
                    f" most {PROBE_TOLERANCE:g}"
                )
            largest = max(largest, difference)
        return largest
