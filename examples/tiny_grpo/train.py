"""Train with Ray: ``python -m tiny_grpo.train --steps 60``, here or as a TrainingRun's job."""

import argparse
import logging
from pathlib import Path

import ray
from trainsync import RunContext

from tiny_grpo.config import Config
from tiny_grpo.driver import train
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History
from tiny_grpo.ray_trainers import RayTrainers


def main() -> None:
    """Claim the attempt, resume from the last checkpoint, train to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="of a run without Kubernetes")
    parser.add_argument("--history", type=Path, help="append one JSON line a step to this file")
    Config.add_arguments(parser)
    arguments = parser.parse_args()
    config = Config.from_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request

    with RunContext.from_env(arguments.directory) as ctx:
        resume = ctx.resume()
        ray.init()
        ctx.synchronizer()
        explorers = ExplorerGroup(ctx, config)
        trainers = RayTrainers(ctx, config, resume)
        explorers.wait_ready()
        train(ctx, config, trainers, explorers, History(arguments.history))


if __name__ == "__main__":
    main()
