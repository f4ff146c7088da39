"""All explorers, as the driver sees them."""

import logging
from collections.abc import Iterator
from typing import Any

import ray
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_EXPLORER

from tiny_grpo.config import Config
from tiny_grpo.explorer import Explorer, Probe
from tiny_grpo.placement import actor_options

# A fresh pod reads the whole of torch from its volume before its first answer.
_START_TIMEOUT = 600.0
# Ray starts one that died anew, and `run` goes on there; training does not wait for it.
_RESTARTS = 3
# Explorers end at once when training has; one that is just being started again is not waited for.
_END_TIMEOUT = 30.0

logger = logging.getLogger(__name__)


class ExplorersGoneError(Exception):
    """No explorer is left to write answers."""


class ExplorerGroup:
    """One Ray actor for each explorer. One that dies is missed; an error in one ends the run."""

    def __init__(self, ctx: RunContext, config: Config) -> None:
        """Ask for the actors, and return at once; `wait_ready` waits for them."""
        actor: Any = ray.remote(Explorer).options(
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            **actor_options(ctx, config, RAY_RESOURCE_EXPLORER),
        )
        self._actors = [actor.remote(ctx, config, index) for index in range(config.explorers)]
        self._running: dict[Any, int] = {}

    def wait_ready(self) -> None:
        """Wait until every explorer has joined the run."""
        self.pids()

    def pids(self) -> list[int]:
        """The explorers' processes."""
        pids: list[int] = ray.get(
            [actor.pid.remote() for actor in self._actors], timeout=_START_TIMEOUT
        )
        return pids

    def start(self) -> None:
        """Let every explorer take turns."""
        self._running = {actor.run.remote(): index for index, actor in enumerate(self._actors)}

    def check(self) -> None:
        """Raise what went wrong in an explorer; one that died is left out from now on.

        Raises:
            ExplorersGoneError: It was the last one.
        """
        list(self._ended(0.0))
        if not self._running:
            raise ExplorersGoneError("no explorer is left: all of them died")

    def last_probes(self) -> list[Probe]:
        """The probe of the last version of every explorer that got to the end."""
        return list(self._ended(_END_TIMEOUT))

    def _ended(self, timeout: float) -> Iterator[Probe]:
        running = list(self._running)
        done, late = ray.wait(running, num_returns=len(running), timeout=timeout)
        for reference in done:
            index = self._running.pop(reference)
            try:
                probe: Probe = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                logger.warning("explorer %d is gone: %s", index, error)
                continue
            if probe.version < 0:
                logger.warning("explorer %d came back when training had ended", index)
            else:
                yield probe
        if timeout > 0:
            for reference in late:
                logger.warning("explorer %d did not end in time", self._running[reference])
