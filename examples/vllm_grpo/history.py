"""What a step was trained on."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_grpo.reference import Checked
from vllm_grpo.rollouts import Sampled


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        reward: mean of its answers.
        tokens: by (server, version).
        unproven: tokens that are not of the weights of the version they claim.
        largest_off: difference of a token's log-probability from the trainer's, in nats.
        refused: answers that were thrown away, since their weights were not proven.
        failures: requests that failed, by server.
    """

    step: int
    reward: float
    tokens: Mapping[tuple[str, int], int]
    unproven: int
    largest_off: float
    refused: int
    failures: Mapping[str, int]
    seconds: float

    @property
    def servers(self) -> list[str]:
        """Names of those that answered."""
        return sorted({server for server, _ in self.tokens})

    @property
    def oldest(self) -> int:
        """The oldest version that made a token."""
        return min(version for _, version in self.tokens)

    def metrics(self) -> dict[str, float]:
        """For the run's status."""
        return {
            "reward": self.reward,
            "staleness": float(self.step - 1 - self.oldest),
            "largest_off_nats": self.largest_off,
            "step_seconds": self.seconds,
        }

    def __str__(self) -> str:
        return (
            f"step {self.step} reward {self.reward:.3f} staleness {self.step - 1 - self.oldest}"
            f" off {self.largest_off:.1e} {self.seconds:.2f} s {' '.join(self.servers)}"
        )


def step_of(step: int, sampled: Sampled, checked: Checked, seconds: float) -> Step:
    """The record of one step."""
    tokens: Counter[tuple[str, int]] = Counter()
    for server, versions in zip(sampled.servers, sampled.versions.tolist(), strict=True):
        tokens.update((server, version) for version in versions)
    return Step(
        step,
        sampled.rollouts.rewards.mean().item(),
        tokens,
        checked.unproven,
        checked.largest,
        sampled.refused,
        sampled.failures,
        seconds,
    )
