"""Train as a TrainingRun's job: ``python -m vllm_grpo.train_on_ray``; see trainingrun.yaml."""

import argparse
import logging
import threading
from collections.abc import Sequence
from typing import Final

import ray
from tiny_grpo.config import Config
from tiny_grpo.placement import actor_options
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_TRAINER
from trainsync.monitor.errors import MonitorError

from vllm_grpo.rollouts import Server
from vllm_grpo.train import make_config, show, train

_LOG = logging.getLogger(__name__)
_ASK_SECONDS: Final = 2.0


class RunServers:
    """The pods of one entry of spec.servers, which come and go; a thread asks, until `close`.

    A call says which the monitor knows; while it is away, which it knew.
    """

    def __init__(self, ctx: RunContext, entry: str) -> None:
        self._ctx = ctx
        self._entry = entry
        self._known: Sequence[Server] = ()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="servers", daemon=True).start()

    def __call__(self) -> Sequence[Server]:
        """See the class."""
        return self._known

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                found = self._ctx.server_weights()
            except MonitorError as error:
                _LOG.warning("servers that come are not known for now: %s", error)
            else:
                self._known = [
                    Server(server.name, server.endpoint, server.agent)
                    for server in found
                    if server.servers == self._entry and server.endpoint and server.agent
                ]
            self._closing.wait(_ASK_SECONDS)


def _train(ctx: RunContext, config: Config) -> None:
    """In a pod of the trainers."""
    _log()
    servers = RunServers(ctx, ctx.servers()[0].name)
    try:
        train(ctx, config, servers, show)
    finally:
        servers.close()


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
