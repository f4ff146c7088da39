"""Was each token made with the weights of its version? The trainer's own model says so.

Agents prove a server's weights by canary prompts. This is the other half, for tests and demos: each
token's log-probability beside that of the trainer's weights at the version that it claims.
"""

from dataclasses import dataclass

import torch
from tiny_grpo.config import Config
from tiny_grpo.policy.model import answer_logprobs, build_model

from vllm_grpo.rollouts import Sampled


@dataclass(frozen=True)
class Checked:
    """``unproven``: tokens that other weights made; ``largest``: difference of a token in nats."""

    tokens: int
    unproven: int
    largest: float


class Reference:
    """The weights of the versions that servers may have.

    Args:
        tolerance: difference of a token, in nats; see `vllm_grpo.trainer`.
        keep: versions that are remembered.
    """

    def __init__(self, config: Config, tolerance: float, keep: int) -> None:
        self._model = build_model(config)
        self._tolerance = tolerance
        self._keep = keep
        self._states: dict[int, dict[str, torch.Tensor]] = {}

    def remember(self, version: int, model: torch.nn.Module) -> None:
        """Copy the weights of a version that is about to be published."""
        self._states[version] = {k: v.detach().clone() for k, v in model.state_dict().items()}
        for old in sorted(self._states)[: -self._keep]:
            del self._states[old]

    @torch.no_grad()
    def check(self, sampled: Sampled) -> Checked:
        """Compare all tokens. Those of a version that is not known count as unproven."""
        off = torch.full_like(sampled.rollouts.logprobs, torch.inf)
        for version in set(sampled.versions.flatten().tolist()):
            if version in self._states:
                self._model.load_state_dict(self._states[version])
                wanted = answer_logprobs(self._model, sampled.rollouts.tokens)
                same = sampled.versions == version
                off[same] = (sampled.rollouts.logprobs - wanted)[same].abs()
        wrong = ~(off <= self._tolerance)  # a NaN is wrong, too
        return Checked(off.numel(), int(wrong.sum()), float(off.max()))
