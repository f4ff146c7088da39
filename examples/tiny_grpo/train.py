"""Train with Ray: ``python -m tiny_grpo.train --steps 60``, here or as a TrainingRun's job."""

import argparse
import logging
from pathlib import Path

import ray
from trainsync import Resume, RunContext
from trainsync.api.names import RAY_RESOURCE_TRAINER

from tiny_grpo.config import Config
from tiny_grpo.driver import train
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History
from tiny_grpo.probes import Probes
from tiny_grpo.ray_trainers import (
    PodLostError,
    RankPlaces,
    RayTrainers,
    TrainerLostError,
    await_pods,
)


def main() -> None:
    """Claim the attempt, resume from the last checkpoint, train to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="of a run without Kubernetes")
    parser.add_argument("--history", type=Path, help="append one JSON line a step to this file")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="of trainers within an attempt; default 3",
    )
    parser.add_argument(
        "--warm-spares",
        action="store_true",
        help="keep a process beside each rank that has torch loaded, for a restart in place, as "
        "with failurePolicy.warmSpare; it takes the memory of torch once more",
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        help="let each step take so long at least, to look on; default 0",
    )
    Config.add_arguments(parser)
    arguments = parser.parse_args()
    config, step_seconds = Config.from_arguments(arguments), arguments.step_seconds
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request

    with RunContext.from_env(arguments.directory) as ctx:
        ctx.resume()  # what it verifies takes time; the Synchronizer and the trainers ask again
        ray.init()
        warm = arguments.warm_spares or ctx.warm_spare
        if warm and ctx.is_local and ray.cluster_resources().get("GPU", 0) > 1:  # type: ignore[no-untyped-call]
            parser.error(
                "warm spares on one machine with several GPUs: Ray would put two ranks on one "
                "GPU; expected one GPU in each pod, or none"
            )
        ctx.synchronizer()
        explorers = ExplorerGroup(ctx, config)
        history, probes = History(arguments.history), Probes()
        places = RankPlaces(warm=warm)

        def train_from(resume: Resume | None) -> None:
            try:
                with RayTrainers(ctx, config, resume, places) as trainers:
                    explorers.wait_ready()
                    train(ctx, config, trainers, explorers, history, probes, step_seconds)
            except PodLostError as error:
                await_pods(places, error, ctx.pod_replacement_seconds, RAY_RESOURCE_TRAINER)
                raise TrainerLostError(str(error)) from error

        ctx.with_restarts(
            train_from, restart_on=TrainerLostError, max_restarts=arguments.max_restarts
        )


if __name__ == "__main__":
    main()
