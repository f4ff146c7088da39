"""Train on answers of vLLM servers: ``python -m vllm_grpo.train --server URL,AGENT_URL …``."""

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tiny_grpo.config import Config
from tiny_grpo.policy.task import make_prompts
from trainsync import RunContext

from vllm_grpo.history import Step, step_of
from vllm_grpo.reference import Reference
from vllm_grpo.rollouts import FindServers, Server, sample
from vllm_grpo.trainer import TOLERANCE, Trainer


def make_config(steps: int) -> Config:
    """That of tiny_grpo with one trainer, and half its rate: answers are some steps old."""
    return Config(steps=steps, trainers=1, explorers=1, learning_rate=2e-4)


def train(
    ctx: RunContext,
    config: Config,
    servers: FindServers,
    after_step: Callable[[Step], object] = lambda _: None,
) -> list[Step]:
    """Train from the last committed checkpoint to ``config.steps``.

    Raises:
        RolloutError: no server answered within ``sync.timeout``.
        CheckpointError: a checkpoint could not be saved, or was not committed.
    """
    trainer = Trainer(ctx, config, ctx.resume())
    stale = ctx.sync.interval if ctx.sync.max_staleness is None else ctx.sync.max_staleness
    reference = Reference(config, TOLERANCE.largest, keep=stale + 2)

    def publish() -> None:
        reference.remember(trainer.step, trainer.model)
        trainer.publish()  # returns when the weights may change

    publish()
    steps: list[Step] = []
    for step in range(trainer.step + 1, config.steps + 1):
        began = time.monotonic()
        positions = range((step - 1) * config.prompts, step * config.prompts)
        prompts = make_prompts(config.digits, config.seed, "train", positions)
        sampled = sample(
            servers,
            prompts,
            config.group_size,
            oldest=step - 1 - stale,
            timeout=ctx.sync.timeout,
        )
        checked = reference.check(sampled)
        loss = trainer.train(sampled.rollouts)
        if ctx.should_sync(step, config.steps):
            publish()
        saves = ctx.should_checkpoint(step, config.steps)
        if saves:
            trainer.save()
        steps.append(step_of(step, sampled, checked, time.monotonic() - began))
        unproven = float(sum(taken.unproven for taken in steps))
        metrics = steps[-1].metrics() | {"loss": loss, "unproven_tokens": unproven}
        ctx.report(step, config.steps, metrics)
        after_step(steps[-1])
        if saves:
            ctx.wait_if_stopping()
    trainer.finish()
    return steps


def show(step: Step) -> None:
    """Print it."""
    print(step, flush=True)


def _server(text: str) -> Server:
    url, _, agent = text.partition(",")
    if not (url.startswith("http") and agent.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text!r}, expected URL,AGENT_URL")
    return Server(url, url.rstrip("/"), agent.rstrip("/"))


def main() -> None:
    """Claim the attempt, resume, train to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=_server, action="append", required=True, dest="servers")
    parser.add_argument("--steps", type=int, default=60, help="default 60")
    parser.add_argument("--directory", type=Path, help="of a run without Kubernetes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
    with RunContext.from_env(arguments.directory) as ctx:
        train(ctx, make_config(arguments.steps), lambda: arguments.servers, show)


if __name__ == "__main__":
    main()
