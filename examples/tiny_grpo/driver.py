"""The training loop, seen from the one process that leads it."""

import asyncio
import dataclasses
import time

from trainsync import RunContext, all_ranks

from tiny_grpo.config import Config
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History, Started, Step
from tiny_grpo.probes import PROBE_TOLERANCE, check_probes
from tiny_grpo.task import make_prompts
from tiny_grpo.trainer import COMPONENTS, Position
from tiny_grpo.trainers import CALL_TIMEOUT, Trainers


def train(
    ctx: RunContext, config: Config, trainers: Trainers, explorers: ExplorerGroup, history: History
) -> None:
    """Train from where ``trainers`` stand to ``config.steps``, and wait for the last commit.

    Raises:
        WeightsDifferError: An explorer does not compute what the trainer computes.
        CheckpointError: A checkpoint could not be saved, or was not committed.
    """
    positions: list[Position] = trainers.call("position")
    start, prompts_seen = positions[0].step, positions[0].prompts_seen
    history.add(Started(ctx.attempt, start, [position.pid for position in positions]))
    print(f"attempt {ctx.attempt} starts after step {start} of {config.steps}", flush=True)
    coordinator = ctx.coordinator(rank=0, world_size=config.trainers)
    version, difference = start, synchronize(start, trainers, explorers)
    constants = {"probe_tolerance": PROBE_TOLERANCE}
    if start:
        constants["resumed_step"] = float(start)
    for step in range(start + 1, config.steps + 1):
        began = time.monotonic()
        positions_now = range(prompts_seen, prompts_seen + config.prompts)
        prompts = make_prompts(config.digits, config.seed, "train", positions_now)
        prompts_seen += config.prompts
        rollouts = explorers.rollout(step, prompts)
        metrics = {
            **constants,
            "reward": rollouts.rewards.mean().item(),
            **dataclasses.asdict(trainers.call("train", rollouts)[0]),
        }
        if ctx.should_sync(step, config.steps):
            version, difference = step, synchronize(step, trainers, explorers)
        metrics["probe_max_abs_diff"] = difference
        if ctx.should_checkpoint(step, config.steps):
            coordinator.register(
                step, checkpoint_participants=all_ranks(*COMPONENTS, world_size=config.trainers)
            )
            metrics["checkpoint_blocked_seconds"] = max(trainers.call("save"))
        metrics["step_seconds"] = time.monotonic() - began
        ctx.report(step, config.steps, metrics)
        history.add(Step(ctx.attempt, step, version, metrics))
        print(
            f"step {step} reward {metrics['reward']:.3f} loss {metrics['loss']:+.4f}"
            f" probe {difference:.1e} {metrics['step_seconds']:.2f} s",
            flush=True,
        )
    trainers.call("finish", CALL_TIMEOUT)
    # A run that resumed at its last step has nothing to wait for, and is told so at once.
    asyncio.run(coordinator.register_and_monitor(config.steps, timeout=CALL_TIMEOUT))


def synchronize(version: int, trainers: Trainers, explorers: ExplorerGroup) -> float:
    """Publish the trainers' weights, let every explorer take them, and compare the probes.

    Returns:
        The largest difference of a log-probability of the probe batch.
    """
    trainers.call("upload")
    explorers.sync(version)
    expected = trainers.call("probe")[0]
    return check_probes(version, expected, explorers.probe())
