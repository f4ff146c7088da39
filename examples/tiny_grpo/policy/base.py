"""The base model: a short supervised warm-up, in the place of a pretrained checkpoint."""

import torch

from tiny_grpo.config import Config
from tiny_grpo.policy.model import answer_logprobs
from tiny_grpo.policy.task import make_prompts, solve
from tiny_grpo.policy.tokenizer import encode

_WARMUP_STEPS = 20


def pretrain(model: torch.nn.Module, config: Config) -> None:
    """Train ``model`` to imitate right answers, until some of its own answers are right.

    GRPO learns from reward differences within a group, so a policy without right answers learns
    nothing.

    Args:
        model: The policy before sharding; changed in place, on its own device.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.base_learning_rate, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    for step in range(config.base_steps):
        positions = range(step * config.base_batch, (step + 1) * config.base_batch)
        prompts = make_prompts(config.digits, config.seed, "base", positions)
        tokens = torch.tensor([encode(prompt + solve(prompt)) for prompt in prompts], device=device)
        loss = -answer_logprobs(model, tokens).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        schedule.step()
