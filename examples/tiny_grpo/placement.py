"""Ray placement of the example's actors."""

import math
from typing import Any

import ray
from trainsync import RunContext

from tiny_grpo.config import Config


def actor_options(
    ctx: RunContext, config: Config, resource: str, shares: int = 1
) -> dict[str, Any]:
    """Options of one trainer or explorer actor.

    In a TrainingRun every pod has one unit of its role's ``resource``, so each actor gets a pod of
    its own; a local Ray has no such resource, if it is not given, and all actors share the machine.
    GPUs, if any, are shared evenly; ``shares`` is how many actors share one actor's part.
    """
    actors = config.trainers + config.explorers
    available: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = min(1.0, available.get("GPU", 0.0) / actors) / shares
    return {
        "num_cpus": 0,
        # Ray's resources have a resolution of 0.0001.
        "num_gpus": math.floor(gpus * 1e4) / 1e4,
        "resources": {} if ctx.is_local and resource not in available else {resource: 1},
    }
