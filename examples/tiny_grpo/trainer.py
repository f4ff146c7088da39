"""One FSDP2 trainer rank: the sharded policy, its optimizer, one GRPO step, and its checkpoints."""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainsync import Resume, RunContext, WeightPublisher, load_sharded

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.policy.base import pretrain
from tiny_grpo.policy.grpo import group_advantages, policy_loss
from tiny_grpo.policy.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.policy.rollout import Rollouts
from tiny_grpo.policy.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """Means over all ranks and over the updates of one step."""

    loss: float
    clipped: float
    grad_norm: float


@dataclass(frozen=True)
class Position:
    """The present step and this rank's process."""

    step: int
    pid: int


def warm_up(config: Config) -> None:
    """Load what a rank loads, and take a step with a model that is thrown away."""
    from trainsync import CheckpointCoordinator  # noqa: F401 - loaded by a rank's first save

    device = prepare_device()
    model = build_model(config).to(device)
    loss = answer_logprobs(model, probe_tokens(config).to(device)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(model.parameters()).step()


class TrainerRank:
    """One rank of the FSDP2 group; the driver calls every method on all ranks at once.

    Attributes:
        module: The sharded policy; trainsync's engines read this attribute.
    """

    def __init__(self, ctx: RunContext, config: Config, resume: Resume | None) -> None:
        """Build this rank's shard; ``torch.distributed`` must be initialised.

        Args:
            config: Equal on all ranks.
            resume: The checkpoint to resume from; None makes a base model and starts at step 0.
        """
        self._ctx = ctx
        self._config = config
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._device = prepare_device()
        self._coordinator = ctx.coordinator(self._rank, self._world_size, overlapped=True)
        self.module = self._sharded(with_base=resume is None)
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda update: min(1.0, (update + 1) / config.learning_rate_warmup)
        )
        self._coordinator.guard(self._optimizer)  # the next step waits for the copy of a save
        # Every rank shuffles its own answers.
        self._generator = torch.Generator().manual_seed(
            derive_seed(config.seed, "shuffle", self._rank)
        )
        self._step = 0
        if resume is not None:
            self._load(resume)
        self._publisher = WeightPublisher(ctx, self, self._coordinator)

    def position(self) -> Position:
        """This rank's position."""
        return Position(self._step, os.getpid())

    def step(self, rollouts: Rollouts, save: bool) -> tuple[StepMetrics, float]:
        """`train`, then `save` if requested, in one call to spare a message.

        Returns:
            the metrics, and the seconds for which the save blocked training.
        """
        return self.train(rollouts), self.save() if save else 0.0

    def train(self, rollouts: Rollouts) -> StepMetrics:
        """Take one GRPO step on this rank's share of ``rollouts``: an equal number of whole
        groups."""
        config = self._config
        share = rollouts.split(self._world_size)[self._rank]
        advantages = group_advantages(share.rewards, config.group_size)
        order = torch.randperm(len(advantages), generator=self._generator)
        sums = torch.zeros(3, device=self._device)
        for batch in order.chunk(config.updates):
            result = policy_loss(
                answer_logprobs(self.module, share.tokens[batch].to(self._device)),
                share.logprobs[batch].to(self._device),
                advantages[batch].to(self._device),
                config.clip,
            )
            self._optimizer.zero_grad()
            result.loss.backward()  # type: ignore[no-untyped-call]
            norm: Any = torch.nn.utils.clip_grad_norm_(
                self.module.parameters(), config.max_grad_norm
            )
            self._optimizer.step()
            self._schedule.step()
            sums += torch.stack([result.loss.detach(), result.clipped, norm.full_tensor()])
        self._step += 1
        dist.all_reduce(sums)
        means = (sums / (config.updates * self._world_size)).tolist()
        return StepMetrics(loss=means[0], clipped=means[1], grad_norm=means[2])

    @torch.no_grad()
    def probe(self) -> torch.Tensor:
        """Log-probabilities of the probe batch, ``(count, digits)`` on the CPU, on all ranks."""
        return answer_logprobs(self.module, probe_tokens(self._config).to(self._device)).cpu()

    def publish(self) -> None:
        """Publish the weights of this step as the version of that number."""
        report = self._publisher.publish(self._step)
        for name, cause in (*report.lost.items(), *report.refused.items()):
            logger.warning("version %d did not reach %s: %s", report.version, name, cause)

    def save(self) -> float:
        """Save this rank's part of a checkpoint of this step, in the background.

        Returns:
            Seconds for which the save blocked training here; the optimizer's next step may wait
                too.
        """
        before = self._coordinator.stats.blocked_seconds
        self._coordinator.save(
            self._step,
            model=self.module,
            optimizer=self._optimizer,
            scheduler=self._schedule,
            generators={"shuffle": self._generator},
        )
        return self._coordinator.stats.blocked_seconds - before

    def finish(self, timeout: float) -> None:
        """Wait until all saves are written and the last step is committed; raises their errors.

        Returns at once in a run that resumed at its last step.
        """
        self._coordinator.finish(self._step, timeout=timeout)
        self._publisher.close()

    def _sharded(self, *, with_base: bool) -> Any:
        model = build_model(self._config).to(self._device)
        if with_base:
            # One rank trains and the others copy its weights, so that ranks on different machines,
            # whose arithmetic may differ in the last bit, start with equal weights.
            if self._rank == 0:
                pretrain(model, self._config)
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
        mesh = init_device_mesh(self._device.type, (self._world_size,))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _load(self, resume: Resume) -> None:
        loaded = load_sharded(
            resume,
            model=self.module,
            optimizer=self._optimizer,
            scheduler=self._schedule,
            generators={"shuffle": self._generator},
        )
        self._step = loaded.step
