"""Steps per second with an overlapped full save after each step, against no saves.

The figure is for the whole tiny example, as in ``tiny_grpo.train``: two trainers, two explorers,
the driver with its monitor. Blocks of steps with and without saves take turns in one run
(`tests.bench.checkpoint.saving_run`). A round compares a block with saves with the mean of the
blocks before and after. The first step of each block is left out: work of the last block may
overlap with it. The figure is the median of the rounds' ratios.

The details have one process that trains on the share of one rank without idle time: the policy's
answers, then forward and backward passes and AdamW's updates. Model and optimizer go to disk
with digest and fsync, without a monitor. A third measurement has the updates alone.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tiny_grpo.config import Config
from tiny_grpo.history import Step, read_history
from tiny_grpo.policy.grpo import group_advantages, policy_loss
from tiny_grpo.policy.model import answer_logprobs, build_model
from tiny_grpo.policy.rollout import Rollouts, sample
from tiny_grpo.policy.task import make_prompts

from tests.bench.checkpoint.checkpoint_state import coordinator_in, forget_saves, scratch
from tests.bench.checkpoint.saving_run import saved_in
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 9
BLOCK = 6
WARM_UP_BLOCKS = 2

ONE_PROCESS_ROUNDS = 9
ONE_PROCESS_WARM_UP = 1
ONE_PROCESS_STEPS = 5


def run() -> list[Figure]:
    """`training_throughput_save_every_step`."""
    whole = whole_example()
    plain, saved = whole["plain"], whole["saved"]
    return [
        Figure(
            name="training_throughput_save_every_step",
            figure=statistics.median(
                (before + after) / 2 / with_saves
                for before, with_saves, after in zip(plain, saved, plain[1:], strict=False)
            ),
            unit="ratio of steps per second",
            goal=">= 0.95",
            peer="the same run's steps without saves",
            details={
                "rounds": ROUNDS,
                "steps_per_block": BLOCK - 1,
                "ratio_of_medians": statistics.median(plain) / statistics.median(saved),
                "save_call_seconds_median": statistics.median(whole["call"]),
                **spread("step_with_save_seconds", saved),
                **spread("step_without_seconds", plain),
                **one_process(),
            },
        )
    ]


def whole_example() -> dict[str, list[float]]:
    """Mean seconds of a step in each block, ``plain`` and ``saved``; of each save's ``call``."""
    blocks = WARM_UP_BLOCKS + 2 * ROUNDS + 1
    with scratch() as directory:
        history = directory / "history.jsonl"
        arguments = [str(directory / "run"), str(history), str(BLOCK), str(blocks * BLOCK)]
        log = directory / "log"
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench.checkpoint.saving_run", *arguments],
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"the example ended with {done.returncode}: {tail(log)}")
        steps = [record for record in read_history(history) if isinstance(record, Step)]
    took: dict[str, list[float]] = {"plain": [], "saved": [], "call": []}
    for start in range(WARM_UP_BLOCKS * BLOCK, len(steps), BLOCK):
        counted = steps[start + 1 : start + BLOCK]
        if counted[-1] is steps[-1]:
            counted.pop()  # the example always saves its last step
        kind = "saved" if saved_in(counted[0].step, BLOCK) else "plain"
        took[kind].append(statistics.mean(step.metrics["step_seconds"] for step in counted))
        if kind == "saved":
            took["call"] += [step.metrics["checkpoint_blocked_seconds"] for step in counted]
    return took


def tail(log: Path) -> str:
    """The end of the example's output."""
    return log.read_text(errors="replace")[-2000:]


class Training:
    """A step of one trainer rank of the example."""

    def __init__(self, config: Config) -> None:
        self.config = config
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


def one_process() -> dict[str, float]:
    """Ratios for one process that only trains, and the cost of its saves."""
    torch.manual_seed(0)
    training = Training(Config())
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
        for round_ in range(ONE_PROCESS_WARM_UP + ONE_PROCESS_ROUNDS):
            for name, work in blocks.items():
                spent = seconds(lambda: block(work))  # noqa: B023 - called at once
                coordinator.wait_all(timeout=60)
                forget_saves(directory)
                if round_ >= ONE_PROCESS_WARM_UP:
                    took[name].append(spent / ONE_PROCESS_STEPS)
        stats = coordinator.stats
    return {
        "one_process_ratio": ratio(took["step"], took["step_saved"]),
        "one_process_ratio_of_updates_alone": ratio(took["plain"], took["saved"]),
        "one_process_blocked_seconds_per_step": stats.blocked_seconds / saved,
        "one_process_step_wait_seconds_per_step": stats.step_wait_seconds / saved,
        "one_process_written_bytes_per_step": stats.written_bytes / saved,
        **spread("one_process_step_with_save_seconds", took["step_saved"]),
        **spread("one_process_step_without_seconds", took["step"]),
    }


def block(step: Callable[[], None]) -> None:
    """Several steps."""
    for _ in range(ONE_PROCESS_STEPS):
        step()


def ratio(without: list[float], with_saves: list[float]) -> float:
    """The median of the rounds' ratios of steps per second."""
    return statistics.median(a / b for a, b in zip(without, with_saves, strict=True))
