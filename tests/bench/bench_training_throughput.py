"""Steps per second with an overlapped save of everything after each, beside none at all.

One process trains the tiny example's model on the share of one of its two ranks: forward and
backward passes and AdamW's updates, without the rollouts, in which nothing of a save is felt. Model
and optimizer go to disk with digest and fsync; no monitor runs in this process. Blocks of steps
with and without saves take turns, and the figure is the median of the rounds' ratios.
"""

import statistics
from collections.abc import Callable

import torch
from tiny_grpo.config import Config
from tiny_grpo.grpo import group_advantages, policy_loss
from tiny_grpo.model import answer_logprobs, build_model
from tiny_grpo.tokenizer import VOCABULARY_SIZE

from tests.bench.checkpoint_state import coordinator_in, forget_saves, scratch
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 9
WARM_UP = 1
STEPS = 5


class Training:
    """What a trainer rank of the example does in a step, on answers that stay the same."""

    def __init__(self) -> None:
        self.config = config = Config()
        self.model = build_model(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        answers = config.prompts // config.trainers * config.group_size
        length = 2 * config.digits + 1
        self.tokens = torch.randint(0, VOCABULARY_SIZE, (answers, length))
        self.advantages = group_advantages(torch.rand(answers), config.group_size)
        with torch.no_grad():
            self.logprobs = answer_logprobs(self.model, self.tokens)

    def step(self) -> None:
        config = self.config
        for batch in torch.randperm(len(self.advantages)).chunk(config.updates):
            result = policy_loss(
                answer_logprobs(self.model, self.tokens[batch]),
                self.logprobs[batch],
                self.advantages[batch],
                config.clip,
            )
            self.optimizer.zero_grad()
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            self.optimizer.step()


def run() -> list[Figure]:
    """`training_throughput_save_every_step`."""
    torch.manual_seed(0)
    training = Training()
    with_saves, without = [], []
    saved = 0
    with scratch() as directory:
        coordinator = coordinator_in(directory, overlapped=True)
        coordinator.guard(training.optimizer)

        def step_and_save() -> None:
            nonlocal saved
            training.step()
            saved += 1
            coordinator.save_async("model", training.model.state_dict(), saved)
            coordinator.save_async("optim", training.optimizer.state_dict(), saved)

        for round_ in range(WARM_UP + ROUNDS):
            saving = seconds(lambda: block(step_and_save))
            coordinator.wait_all(timeout=60)
            plain = seconds(lambda: block(training.step))
            forget_saves(directory)
            if round_ >= WARM_UP:
                with_saves.append(saving / STEPS)
                without.append(plain / STEPS)
        stats = coordinator.stats
    return [
        Figure(
            name="training_throughput_save_every_step",
            figure=statistics.median(b / a for a, b in zip(with_saves, without, strict=True)),
            unit="ratio of steps per second",
            goal=">= 0.95",
            peer="the same training without saves",
            details={
                "rounds": ROUNDS,
                "steps_per_block": STEPS,
                "ratio_of_minima": min(without) / min(with_saves),
                "blocked_seconds_per_step": stats.blocked_seconds / saved,
                "step_wait_seconds_per_step": stats.step_wait_seconds / saved,
                "slot_wait_seconds_per_step": stats.slot_wait_seconds / saved,
                "written_bytes_per_step": stats.written_bytes / saved,
                **spread("step_with_save_seconds", with_saves),
                **spread("step_without_seconds", without),
            },
        )
    ]


def block(step: Callable[[], None]) -> None:
    """Several steps."""
    for _ in range(STEPS):
        step()
