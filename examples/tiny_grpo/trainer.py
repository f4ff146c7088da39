"""One FSDP2 trainer rank: the sharded policy, its optimizer, and one GRPO step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiny_grpo.base import pretrain
from tiny_grpo.config import Config
from tiny_grpo.device import pick_device
from tiny_grpo.grpo import group_advantages, policy_loss
from tiny_grpo.model import answer_logprobs, build_model, probe_tokens
from tiny_grpo.rollout import Rollouts
from tiny_grpo.seeding import derive_seed


@dataclass(frozen=True)
class StepMetrics:
    """Means over all ranks and over the updates of one step."""

    loss: float
    clipped: float
    grad_norm: float


class TrainerRank:
    """One rank of the FSDP2 group; every method is called on all ranks at once.

    Attributes:
        module: The sharded policy (the name by which trainsync's engines know it).
        step: GRPO steps taken.
    """

    def __init__(self, config: Config, *, pretrained: bool) -> None:
        """Build this rank's shard; ``torch.distributed`` must be initialised.

        Args:
            config: Equal on all ranks.
            pretrained: Make the base model first. False when a checkpoint is loaded anyway.
        """
        self._config = config
        self._device = pick_device()
        model = build_model(config).to(self._device)
        if pretrained:
            # One rank trains and the others take its weights, so that ranks on unlike machines,
            # whose arithmetic may differ in the last bit, start from the same ones.
            if dist.get_rank() == 0:
                pretrain(model, config)
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        self.module = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / config.learning_rate_warmup)
        )
        # Ranks shuffle their own answers, each with a generator of its own.
        self.generator = torch.Generator().manual_seed(
            derive_seed(config.seed, "shuffle", dist.get_rank())
        )
        self.step = 0

    def train(self, rollouts: Rollouts) -> StepMetrics:
        """Take one GRPO step on this rank's answers: whole groups, as many on every rank."""
        config = self._config
        advantages = group_advantages(rollouts.rewards, config.group_size)
        order = torch.randperm(len(advantages), generator=self.generator)
        sums = torch.zeros(3, device=self._device)
        for batch in order.chunk(config.updates):
            result = policy_loss(
                answer_logprobs(self.module, rollouts.tokens[batch].to(self._device)),
                rollouts.logprobs[batch].to(self._device),
                advantages[batch].to(self._device),
                config.clip,
            )
            self.optimizer.zero_grad()
            result.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
            self.optimizer.step()
            self.schedule.step()
            sums += torch.stack([result.loss.detach(), result.clipped, norm.full_tensor()])
        self.step += 1
        dist.all_reduce(sums)
        means = (sums / (config.updates * dist.get_world_size())).tolist()
        return StepMetrics(loss=means[0], clipped=means[1], grad_norm=means[2])

    @torch.no_grad()
    def probe(self) -> torch.Tensor:
        """Log-probabilities of the probe batch, ``(count, digits)`` on the CPU, on all ranks."""
        return answer_logprobs(self.module, probe_tokens(self._config).to(self._device)).cpu()
