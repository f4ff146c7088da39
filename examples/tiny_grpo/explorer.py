"""One explorer: takes each new version of the weights and writes answers."""

import os
from dataclasses import dataclass

import torch
from trainsync import ModuleEngine, RunContext
from trainsync.api.spec import SyncStyle

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.policy.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.policy.rollout import Rollouts, sample
from tiny_grpo.policy.seeding import derive_seed
from tiny_grpo.policy.task import make_prompts


@dataclass(frozen=True)
class Probe:
    """An explorer's result for the probe batch: ``logprobs`` is ``(count, digits)``, float32."""

    explorer: int
    version: int
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Answers:
    """One batch of answers, and the probe of the version that wrote them."""

    rollouts: Rollouts
    probe: Probe


class Explorer:
    """Runs as a Ray actor of its own; `tiny_grpo.explorers` makes them."""

    def __init__(self, ctx: RunContext, config: Config, index: int) -> None:
        """Join the run; the weights are random until `run` takes the first version.

        Args:
            index: This explorer's number, below ``config.explorers``.
        """
        self._config = config
        self._index = index
        self._device = prepare_device()
        self._model = build_model(config).to(self._device)
        self._engine = ModuleEngine(self._model)
        self._client = ctx.explorer(f"explorer-{index}")
        self._pace = ctx.pace_explorer(self._client, self._update)
        self._style = ctx.sync.style
        self._probe = self.probe()

    def pid(self) -> int:
        """The process ID of this explorer."""
        return os.getpid()

    def run(self) -> Probe:
        """Write a batch of answers whenever it is this explorer's turn, until training ends.

        Returns:
            The probe of the last version.
        """
        for turn in self._pace:
            seed = derive_seed(self._config.seed, "rollout", turn.number, self._index)
            prompts = self._prompts(turn.number)
            scoring = self._pace.span("rl.reward")
            rollouts = sample(self._model, prompts, self._config.group_size, seed, scoring)
            self._pace.deliver(turn, Answers(rollouts, self._probe))
        return self._probe

    def _update(self, version: int) -> int | None:
        """Take a version newer than ``version``; None after the last one."""
        newer = self._client.update(self._engine, version)
        self._probe = self.probe()
        return newer

    def _prompts(self, number: int) -> list[str]:
        """This explorer's share of a step with style fixed, else the batch of that number."""
        explorers = self._config.explorers
        if self._style is SyncStyle.FIXED:
            number = (number - 1) * explorers + self._index + 1
        share = self._config.prompts // explorers
        positions = range((number - 1) * share, number * share)
        return make_prompts(self._config.digits, self._config.seed, "train", positions)

    @torch.no_grad()
    def probe(self) -> Probe:
        """Log-probabilities of the probe batch under the current version."""
        tokens = probe_tokens(self._config).to(self._device)
        return Probe(self._index, self._engine.version, answer_logprobs(self._model, tokens).cpu())
