"""Train as a TrainingRun's job: ``python -m vllm_grpo.train_on_ray``; see trainingrun.yaml."""

import argparse
import logging
from collections.abc import Sequence

import ray
from tiny_grpo.config import Config
from tiny_grpo.placement import actor_options
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_TRAINER
from trainsync.monitor.errors import MonitorError

from vllm_grpo.rollouts import Server
from vllm_grpo.train import make_config, show, train

_LOG = logging.getLogger(__name__)


class RunServers:
    """The run's servers, one by one: pods that come and go."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._known: Sequence[Server] = ()

    def __call__(self) -> Sequence[Server]:
        """Those that the monitor knows; while it is away, those that it knew."""
        try:
            found = self._ctx.server_weights()
        except MonitorError as error:
            _LOG.warning("servers that come are not known for now: %s", error)
        else:
            self._known = [
                Server(server.name, server.endpoint, server.agent)
                for server in found
                if server.endpoint and server.agent
            ]
        return self._known


def _train(ctx: RunContext, config: Config) -> None:
    """In a pod of the trainers."""
    _log()
    train(ctx, config, RunServers(ctx), show)


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request


def main() -> None:
    """Claim the attempt, and train to the end in the pod of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="default 60")
    config = make_config(parser.parse_args().steps)
    _log()
    with RunContext.from_env() as ctx:
        ray.init()
        # Tried again by a new attempt, and not by Ray.
        options = actor_options(ctx, config, RAY_RESOURCE_TRAINER) | {"max_retries": 0}
        task = ray.remote(_train).options(**options)
        # Training takes as long as it takes: spec.failurePolicy.progressDeadlineSeconds bounds it.
        ray.get(task.remote(ctx, config))


if __name__ == "__main__":
    main()
