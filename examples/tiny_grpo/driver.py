"""The training loop in the driver process."""

import dataclasses
import time

from trainsync import RunContext

from tiny_grpo.config import Config
from tiny_grpo.explorer import Answers
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History, Started, Step
from tiny_grpo.policy.rollout import Rollouts
from tiny_grpo.probes import PROBE_TOLERANCE, Probes
from tiny_grpo.trainer import Position
from tiny_grpo.trainers import CALL_TIMEOUT, Trainers


def train(
    ctx: RunContext,
    config: Config,
    trainers: Trainers,
    explorers: ExplorerGroup,
    history: History,
    probes: Probes,
    step_seconds: float = 0.0,
) -> None:
    """Train from the present step of ``trainers`` to ``config.steps``, and wait for the last
    commit.

    Args:
        probes: Of the attempt; when trainers are restarted, explorers go on with earlier versions.
        step_seconds: Each step takes so long at least.

    Raises:
        WeightsDifferError: An explorer computes other log-probabilities than the trainer.
        CheckpointError: A checkpoint could not be saved, or was not committed.
    """
    positions: list[Position] = trainers.call("position")
    start = positions[0].step
    pids = [position.pid for position in positions]
    history.add(Started(ctx.attempt, start, pids, explorers.pids()))
    print(f"attempt {ctx.attempt} starts after step {start} of {config.steps}", flush=True)

    def publish(version: int) -> None:
        trainers.call("publish")
        probes.expect(version, trainers.call("probe")[0])

    def check() -> None:
        trainers.check()  # first: an explorer's pod may have been lost with a trainer's
        explorers.check()

    constants = {"probe_tolerance": PROBE_TOLERANCE}
    if start:
        constants["resumed_step"] = float(start)
        # With the method `checkpoint`, the attempt before may have published this version.
        probes.expect(start, trainers.call("probe")[0])
    metrics: dict[str, float] = {}
    pace = ctx.pace_trainer(
        publish,
        step=start,
        batches_per_step=config.explorers,
        meanwhile=check,
        keep_batches=True,  # an explorer draws its prompts by the number of its turn
    )
    explorers.start()
    for step in range(start + 1, config.steps + 1):
        began = time.monotonic()
        batches = pace.next_batches()
        answers: list[Answers] = [batch.payload for batch in batches]
        rollouts = Rollouts.join([answer.rollouts for answer in answers])
        version = min(batch.version for batch in batches)
        saves = ctx.should_checkpoint(step, config.steps)
        trained = trainers.call("step", rollouts, saves)
        metrics = {
            **constants,
            "reward": rollouts.rewards.mean().item(),
            **dataclasses.asdict(trained[0][0]),
            "staleness": float(step - 1 - version),
            "probe_max_abs_diff": probes.check([answer.probe for answer in answers]),
        }
        if saves:
            metrics["checkpoint_blocked_seconds"] = max(blocked for _, blocked in trained)
        pace.trained(step)
        explorers.check()
        metrics["step_seconds"] = time.monotonic() - began
        ctx.report(step, config.steps, metrics)
        history.add(Step(ctx.attempt, step, version, metrics))
        print(
            f"step {step} reward {metrics['reward']:.3f} loss {metrics['loss']:+.4f}"
            f" version {version} probe {metrics['probe_max_abs_diff']:.1e}"
            f" {metrics['step_seconds']:.2f} s",
            flush=True,
        )
        if saves:
            ctx.wait_if_stopping()
        time.sleep(max(0.0, step_seconds - (time.monotonic() - began)))
    pace.finish(meanwhile=trainers.check)
    metrics["probe_max_abs_diff"] = probes.check(explorers.last_probes())
    ctx.report(config.steps, config.steps, constants | metrics)
    trainers.call("finish", CALL_TIMEOUT)
