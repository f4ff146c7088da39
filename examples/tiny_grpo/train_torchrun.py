"""Train under torchrun: ``torchrun --nproc-per-node 2 -m tiny_grpo.train_torchrun --steps 60``.

The same loop, trainer and explorers as `tiny_grpo.train`; only the trainers' processes are started
by torchrun instead of Ray. The explorers are actors of the Ray at ``RAY_ADDRESS``.
"""

import argparse
import logging
import os
from datetime import timedelta
from pathlib import Path

import ray
import torch.distributed as dist
from trainsync import RunContext

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.driver import train
from tiny_grpo.explorers import ExplorerGroup
from tiny_grpo.history import History
from tiny_grpo.probes import Probes
from tiny_grpo.torchrun_trainers import TorchrunTrainers
from tiny_grpo.trainer import TrainerRank
from tiny_grpo.trainers import COLLECTIVE_TIMEOUT


def main() -> None:
    """Run one rank: claim with all ranks, resume, and drive or follow to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="of the run")
    parser.add_argument("--history", type=Path, help="append one JSON line a step to this file")
    Config.add_arguments(parser)
    arguments = parser.parse_args()
    config = Config.from_arguments(arguments)
    if int(os.environ["WORLD_SIZE"]) != config.trainers:
        parser.error(
            f"--trainers is {config.trainers}, torchrun started {os.environ['WORLD_SIZE']}"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request

    dist.init_process_group(
        dist.get_default_backend_for_device(prepare_device()),
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    ray.init(address="auto")
    with RunContext.from_env(arguments.directory) as ctx:
        leads = dist.get_rank() == 0
        resume = ctx.resume()  # the same on all ranks
        if leads:
            ctx.synchronizer()
            explorers = ExplorerGroup(ctx, config)
        trainers = TorchrunTrainers(TrainerRank(ctx, config, resume))
        if leads:
            explorers.wait_ready()
            history = History(arguments.history)
            train(ctx, config, trainers, explorers, history, Probes())
            trainers.dismiss()
        else:
            trainers.follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
