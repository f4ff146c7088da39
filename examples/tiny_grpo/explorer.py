"""One explorer: takes each new version of the weights, and writes answers with it."""

from dataclasses import dataclass

import torch
from trainsync import RunContext
from trainsync.weights.errors import WeightsUnavailableError

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.rollout import Rollouts, sample
from tiny_grpo.seeding import derive_seed


@dataclass(frozen=True)
class Probe:
    """What an explorer makes of the probe batch: ``logprobs`` is ``(count, digits)``, float32."""

    explorer: int
    version: int
    logprobs: torch.Tensor


class Explorer:
    """Runs as a Ray actor of its own; `tiny_grpo.explorers` makes them."""

    def __init__(self, ctx: RunContext, config: Config, index: int) -> None:
        """Join the run; the weights are random until the first `sync`.

        Args:
            index: This explorer's number, below ``config.explorers``.
        """
        self._config = config
        self._index = index
        self._device = prepare_device()
        self._model = build_model(config).to(self._device)
        self._client = ctx.explorer(f"explorer-{index}")
        self._version = -1

    def sync(self, version: int) -> int:
        """Serve ``version``, or a newer one if there is; returns which.

        Raises:
            WeightsUnavailableError: It was not published in time, or never will be.
        """
        if self._version < version:
            weights = self._client.wait_and_fetch(version - 1)
            if weights is None:
                raise WeightsUnavailableError(
                    f"explorer {self._index} has version {self._version}, and the trainer stopped"
                    f" before version {version}"
                )
            self._model.load_state_dict(weights.state_dict)
            self._client.acknowledge(weights)
            self._version = weights.version
        return self._version

    def rollout(self, step: int, prompts: list[str]) -> Rollouts:
        """Answers to ``prompts``: a function of the weights, the seed, the step and the index."""
        seed = derive_seed(self._config.seed, "rollout", step, self._index)
        return sample(self._model, prompts, self._config.group_size, seed)

    @torch.no_grad()
    def probe(self) -> Probe:
        """Log-probabilities of the probe batch under the version that is served."""
        tokens = probe_tokens(self._config).to(self._device)
        return Probe(self._index, self._version, answer_logprobs(self._model, tokens).cpu())
