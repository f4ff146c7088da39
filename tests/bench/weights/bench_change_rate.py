"""The share of the tiny GRPO example's weights that one training step changes in bf16.

The master weights are float32, and bf16 is sent: a small update often leaves a bf16 element
unchanged. The share depends mostly on the learning rate, so the training runs once at the
example's rate and once at a rate usual for large models.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Final

import torch
from tiny_grpo.config import Config
from tiny_grpo.policy.base import pretrain
from tiny_grpo.policy.grpo import group_advantages, policy_loss
from tiny_grpo.policy.model import answer_logprobs, build_model
from tiny_grpo.policy.rollout import sample
from tiny_grpo.policy.seeding import derive_seed
from tiny_grpo.policy.task import make_prompts
from trainsync.weights.delta.codec import Bytes, Coding, blocks, encode

from tests.bench.harness import Figure, spread

USUAL_RATE: Final = 1e-6  # for GRPO with models of billions of parameters


def weights(model: torch.nn.Module) -> Bytes:
    """The bytes of all parameters in bf16."""
    flat = torch.cat([p.detach().bfloat16().reshape(-1) for p in model.parameters()])
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


def train(config: Config) -> Iterator[Bytes]:
    """The example's training in one process; yields the weights before it and after every step."""
    model = build_model(config)
    pretrain(model, config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, (update + 1) / config.learning_rate_warmup)
    )
    generator = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", 0))
    yield weights(model)
    for step in range(config.steps):
        positions = range(step * config.prompts, (step + 1) * config.prompts)
        prompts = make_prompts(config.digits, config.seed, "train", positions)
        seed = derive_seed(config.seed, "rollout", step, 0)
        rollouts = sample(model, prompts, config.group_size, seed)
        advantages = group_advantages(rollouts.rewards, config.group_size)
        order = torch.randperm(len(advantages), generator=generator)
        for batch in order.chunk(config.updates):
            logprobs = answer_logprobs(model, rollouts.tokens[batch])
            result = policy_loss(logprobs, rollouts.logprobs[batch], advantages[batch], config.clip)
            optimizer.zero_grad()
            result.loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
        yield weights(model)


def rates(config: Config) -> tuple[list[float], list[float]]:
    """For every step: the share of changed elements, and of a delta's bytes in the whole."""
    changed, sent = [], []
    versions = train(config)
    last = next(versions)
    for now in versions:
        changed.append(float((last.view("<u2") != now.view("<u2")).mean()))
        delta = encode(last, now, blocks(0, now.size, 2), 2 * now.size, Coding.COMPACT)
        assert delta is not None
        sent.append(delta.size / now.size)
        last = now
    return changed, sent


def run() -> list[Figure]:
    """`grpo_bf16_change_rate`: the median of all steps, at the example's learning rate."""
    config = Config()
    torch.set_num_threads(1)
    details: dict[str, float] = {"steps": float(config.steps)}
    figure = 0.0
    for name, rate in (("example", config.learning_rate), ("usual", USUAL_RATE)):
        changed, sent = rates(dataclasses.replace(config, learning_rate=rate))
        details[f"{name}_learning_rate"] = rate
        details |= spread(f"{name}_changed", changed) | spread(f"{name}_delta_bytes", sent)
        if name == "example":
            figure = statistics.median(changed)
    peer = f"all elements; at a learning rate of {USUAL_RATE:g} see usual_changed"
    return [Figure("grpo_bf16_change_rate", figure, "of the elements", "<= 1", peer, details)]
