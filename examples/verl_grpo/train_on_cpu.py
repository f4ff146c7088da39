"""Train verl's FSDP engine on CPUs: ``python -m verl_grpo.train_on_cpu``.

In the place of ``python -m verl.trainer.main_ppo`` where there are no GPUs: the engine, its
checkpoints and its weights are the real ones, the model is tiny, and transformers writes the
rollouts. See README.md beside this.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import ray
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_EXPLORER, RAY_RESOURCE_TRAINER

from verl_grpo.cpu_explorer import Answers, Explorer
from verl_grpo.cpu_trainer import SECONDS, Trainers
from verl_grpo.tiny_qwen2 import Rollouts

END_SECONDS = 30.0


class WeightsDifferError(Exception):
    """An explorer's weights differ from the published ones."""


class Digests:
    """The digest of each published version, and the number of explorers' matches."""

    def __init__(self) -> None:
        self._published: dict[int, str] = {}
        self.equal = 0

    def publish(self, trainers: Trainers, version: int) -> None:
        """Publish a version and record its digest."""
        self._published[version] = trainers.call("publish", version)[0]

    def check(self, explorer: int, version: int, found: str) -> None:
        """Raises WeightsDifferError."""
        expected = self._published[version]
        if found != expected:
            raise WeightsDifferError(
                f"explorer {explorer} has weights {found} as version {version}; expected {expected}"
            )
        self.equal += 1


def train(ctx: RunContext, steps: int, trainers: int, explorers: int) -> None:
    """Resume from the last checkpoint and train to the end.

    Raises:
        WeightsDifferError: an explorer got other weights than the published ones.
    """
    resume = ctx.resume()
    ray.init()
    ctx.synchronizer()
    actor: Any = ray.remote(Explorer).options(**_placed(ctx, RAY_RESOURCE_EXPLORER))
    actors = [actor.remote(ctx, index) for index in range(explorers)]
    ranks = Trainers(ctx, resume, steps, trainers, _placed(ctx, RAY_RESOURCE_TRAINER))
    ray.get([one.ready.remote() for one in actors], timeout=SECONDS)
    running = [one.run.remote() for one in actors]

    def all_live() -> None:
        ranks.check()
        ended, _ = ray.wait(running, num_returns=len(running), timeout=0)
        ray.get(ended)  # raises the explorer's error

    digests = Digests()
    start = 0 if resume is None else resume.step
    pace = ctx.pace_trainer(
        lambda version: digests.publish(ranks, version),
        step=start,
        batches_per_step=explorers,
        meanwhile=all_live,
    )
    metrics: dict[str, float] = {}
    for step in range(start + 1, steps + 1):
        answers: list[Answers] = [batch.payload for batch in pace.next_batches()]
        for answer in answers:
            digests.check(answer.explorer, answer.version, answer.digest)
        rollouts = Rollouts.join([answer.rollouts for answer in answers])
        loss = ranks.call("train", rollouts)[0]
        pace.trained(step)
        saves = ctx.should_checkpoint(step, steps)
        if saves:
            ranks.call("save", step)
        metrics = {
            "resumed_step": float(start),
            "reward": rollouts.rewards.mean().item(),
            "loss": loss,
            "equal_digests": float(digests.equal),
        }
        ctx.report(step, steps, metrics)
        print(f"step {step} of {steps}: {metrics}", flush=True)
        if saves:
            ctx.wait_if_stopping()
    pace.finish(meanwhile=ranks.check)
    for index, (version, found) in enumerate(ray.get(running, timeout=END_SECONDS)):
        digests.check(index, version, found)
    ranks.call("finish")
    ctx.report(steps, steps, {**metrics, "equal_digests": float(digests.equal)})


def _placed(ctx: RunContext, resource: str) -> dict[str, Any]:
    """Options of an actor, which has its own pod in a TrainingRun."""
    return {"num_cpus": 0, "resources": {} if ctx.is_local else {resource: 1}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train verl's FSDP engine on CPUs.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--explorers", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="of a run without Kubernetes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
    with RunContext.from_env(options.directory) as ctx:
        train(ctx, options.steps, options.trainers, options.explorers)


if __name__ == "__main__":
    main()
