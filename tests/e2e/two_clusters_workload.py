"""A trainer in one Ray cluster and an explorer in another, which takes every version.

The tests mount this file into the pods as a ConfigMap.
"""

import sys
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from trainsync import RunContext, WeightPublisher
from trainsync.api.names import RAY_RESOURCE_EXPLORER
from trainsync.engines.module_engine import TrainedModule
from trainsync.weights.synchronizer.roster import STOPPED

STEPS = 8
_SECONDS = 120.0


def train() -> None:
    """Publish versions, each when the explorer has the one before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(100, 100)
    with RunContext.from_env() as ctx, WeightPublisher(ctx, TrainedModule(model)) as publisher:
        synchronizer = ctx.synchronizer()
        deadline = time.monotonic() + _SECONDS
        while not ray.get(synchronizer.get_status.remote(), timeout=_SECONDS).explorers:
            if time.monotonic() > deadline:
                raise TimeoutError("no explorer came")
            time.sleep(0.2)
        for step in range(1, STEPS + 1):
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, step)
            publisher.publish(step)
            if not ray.get(synchronizer.wait_acknowledged.remote(step, _SECONDS)):
                raise TimeoutError(f"version {step} did not reach the explorer")
            known = ray.get(synchronizer.get_status.remote(), timeout=_SECONDS).explorers
            if {name: each.version for name, each in known.items()} != {"far-0": step}:
                raise ValueError(f"version {step} was sent, and explorers have {known}")
            ctx.report(step, total=STEPS)
        ray.get(synchronizer.set_trainer_status.remote(STOPPED), timeout=_SECONDS)


class Explorer:
    """In a pod for explorers."""

    def run(self, ctx: RunContext) -> int:
        """The last version; raises ValueError for weights of another version than they say."""
        client = ctx.explorer("far-0")
        version = -1
        while (weights := client.wait_and_fetch(version)) is not None:
            version = weights.version
            if any(bool((each != version).any()) for each in weights.state_dict.values()):
                raise ValueError(f"version {version} came with other weights")
            client.acknowledge(weights)
        client.leave()
        return version


def explore() -> None:
    """Let the explorer's pod take versions until training has ended."""
    with RunContext.from_env() as ctx:
        options = {"num_cpus": 0, "resources": {RAY_RESOURCE_EXPLORER: 1}}
        actor: Any = ray.remote(Explorer).options(**options).remote()
        if (last := ray.get(actor.run.remote(ctx))) != STEPS:
            raise ValueError(f"the last version is {last}, expected {STEPS}")


if __name__ == "__main__":
    ray.init(address="auto")
    {"train": train, "explore": explore}[sys.argv[1]]()
