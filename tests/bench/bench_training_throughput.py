"""Steps per second with an overlapped save of everything after each, beside none at all.

One process does a step of the tiny example on the share of one of its two ranks: the policy's
answers, then forward and backward passes and AdamW's updates. Model and optimizer go to disk with
digest and fsync; no monitor runs in this process. Blocks of steps with and without saves take
turns, and the figure is the median of the rounds' ratios. The same for the updates alone, which
leave a save no idle moment, stands beside it.
"""

import statistics
from collections.abc import Callable

import torch
from tiny_grpo.config import Config
from tiny_grpo.grpo import group_advantages, policy_loss
from tiny_grpo.model import answer_logprobs, build_model
from tiny_grpo.rollout import Rollouts, sample
from tiny_grpo.task import make_prompts

from tests.bench.checkpoint_state import coordinator_in, forget_saves, scratch
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 9
WARM_UP = 1
STEPS = 5


class Training:
    """What a trainer rank of the example does in a step."""

    def __init__(self) -> None:
        self.config = config = Config()
        self.model = build_model(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.prompts = make_prompts(
            config.digits, 0, "bench", range(config.prompts // config.trainers)
        )
        self.rollouts = self.answer()

    def answer(self) -> Rollouts:
        return sample(self.model, self.prompts, self.config.group_size, seed=0)

    def step(self) -> None:
        self.rollouts = self.answer()
        self.update()

    def update(self) -> None:
        config, rollouts = self.config, self.rollouts
        advantages = group_advantages(rollouts.rewards, config.group_size)
        for batch in torch.randperm(len(advantages)).chunk(config.updates):
            result = policy_loss(
                answer_logprobs(self.model, rollouts.tokens[batch]),
                rollouts.logprobs[batch],
                advantages[batch],
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
    took: dict[str, list[float]] = {name: [] for name in ("step_saved", "step", "saved", "plain")}
    saved = 0
    with scratch() as directory:
        coordinator = coordinator_in(directory, overlapped=True)
        coordinator.guard(training.optimizer)

        def save_after(work: Callable[[], None]) -> None:
            nonlocal saved
            work()
            saved += 1
            coordinator.save_async("model", training.model.state_dict(), saved)
            coordinator.save_async("optim", training.optimizer.state_dict(), saved)

        blocks = {
            "step_saved": lambda: save_after(training.step),
            "step": training.step,
            "saved": lambda: save_after(training.update),
            "plain": training.update,
        }
        for round_ in range(WARM_UP + ROUNDS):
            for name, work in blocks.items():
                spent = seconds(lambda: block(work))  # noqa: B023 - called at once
                coordinator.wait_all(timeout=60)
                forget_saves(directory)
                if round_ >= WARM_UP:
                    took[name].append(spent / STEPS)
        stats = coordinator.stats
    return [
        Figure(
            name="training_throughput_save_every_step",
            figure=ratio(took["step"], took["step_saved"]),
            unit="ratio of steps per second",
            goal=">= 0.95",
            peer="the same training without saves",
            details={
                "rounds": ROUNDS,
                "steps_per_block": STEPS,
                "ratio_of_minima": min(took["step"]) / min(took["step_saved"]),
                "ratio_of_updates_alone": ratio(took["plain"], took["saved"]),
                "blocked_seconds_per_step": stats.blocked_seconds / saved,
                "step_wait_seconds_per_step": stats.step_wait_seconds / saved,
                "slot_wait_seconds_per_step": stats.slot_wait_seconds / saved,
                "written_bytes_per_step": stats.written_bytes / saved,
                **spread("step_with_save_seconds", took["step_saved"]),
                **spread("step_without_seconds", took["step"]),
                **spread("update_with_save_seconds", took["saved"]),
                **spread("update_without_seconds", took["plain"]),
            },
        )
    ]


def block(step: Callable[[], None]) -> None:
    """Several steps."""
    for _ in range(STEPS):
        step()


def ratio(without: list[float], with_saves: list[float]) -> float:
    """Of steps per second, the median of the rounds."""
    return statistics.median(a / b for a, b in zip(without, with_saves, strict=True))
