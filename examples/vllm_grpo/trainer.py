"""The trainer: the policy, its optimizer, one GRPO step, and versions with their proofs."""

from typing import Final

import torch
from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.policy.base import pretrain
from tiny_grpo.policy.grpo import group_advantages, policy_loss
from tiny_grpo.policy.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.policy.rollout import Rollouts
from tiny_grpo.policy.seeding import derive_seed
from trainsync import Resume, RunContext, WeightPublisher, load_sharded
from trainsync.weights.proof.asking import Prover
from trainsync.weights.proof.canaries import Prompts, check_canaries
from trainsync.weights.proof.record import Tolerance

# Ten times what `python -m vllm_grpo.measure` gave for servers in float32 on one kind of CPU (30
# versions, vLLM 0.32.0): others may round elsewhere. A step moves the model by 0.04 (rms) or more.
TOLERANCE: Final = Tolerance(typical=3e-6, rms=1.7e-5, largest=1.4e-4)
_CANARIES: Final = 64
_MOST_WEIGHT: Final = 2.0


def make_canaries(config: Config) -> Prompts:
    """Prompts of the task with their right answers: they see a step better than random tokens."""
    return check_canaries(probe_tokens(config, _CANARIES).tolist())


def importance(present: torch.Tensor, served: torch.Tensor) -> torch.Tensor:
    """``(answers,)``: weight of each, from log-probabilities ``(answers, digits)``."""
    return (present - served).sum(1).exp().clamp(max=_MOST_WEIGHT)


class Trainer:
    """One process; a model on several GPUs would be sharded (FSDP), and nothing else changes.

    Args:
        resume: the checkpoint to go on from; None makes a base model.

    Attributes:
        model: the policy, float32.
        step: that was taken last.
    """

    def __init__(self, ctx: RunContext, config: Config, resume: Resume | None) -> None:
        self._config = config
        self._device = prepare_device()
        self.model = build_model(config).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda update: min(1.0, (update + 1) / config.learning_rate_warmup)
        )
        self._coordinator = ctx.coordinator(0, 1)
        self._publisher = WeightPublisher(
            ctx, self, self._coordinator, prover=Prover(make_canaries(config), TOLERANCE)
        )
        self.step = 0
        if resume is None:
            pretrain(self.model, config)
        else:
            loaded = load_sharded(
                resume, model=self.model, optimizer=self._optimizer, scheduler=self._schedule
            )
            self.step = loaded.step

    @property
    def module(self) -> torch.nn.Module:
        """The model; trainsync's engines read this attribute."""
        return self.model

    def train(self, rollouts: Rollouts) -> float:
        """Take one GRPO step; its mean loss.

        The answers may be some steps old. So the advantage of each is weighted by how likely it
        is now, beside how likely its servers say it was (truncated importance sampling); the
        clipped ratio is to the present policy.
        """
        config = self._config
        tokens = rollouts.tokens.to(self._device)
        with torch.no_grad():
            present = answer_logprobs(self.model, tokens)
        weights = importance(present, rollouts.logprobs.to(self._device))
        advantages = group_advantages(rollouts.rewards.to(self._device), config.group_size)
        self.step += 1
        shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", self.step))
        losses = []
        for batch in torch.randperm(len(advantages), generator=shuffle).chunk(config.updates):
            result = policy_loss(
                answer_logprobs(self.model, tokens[batch]),
                present[batch],
                (weights * advantages)[batch],
                config.clip,
            )
            self._optimizer.zero_grad()
            result.loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            self._optimizer.step()
            self._schedule.step()
            losses.append(result.loss.item())
        return sum(losses) / len(losses)

    def publish(self) -> None:
        """Save the weights of this step as a version, with its proof, in the background."""
        self._publisher.publish(self.step)

    def save(self) -> None:
        """Save a checkpoint of this step, in the background."""
        self._coordinator.save(
            self.step, model=self.model, optimizer=self._optimizer, scheduler=self._schedule
        )

    def finish(self) -> None:
        """Wait until all saves are committed."""
        self._coordinator.finish()
        self._publisher.close()
