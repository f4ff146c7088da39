"""The driver's handle of all explorers."""

import logging
from collections.abc import Iterator
from typing import Any

import ray
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_EXPLORER

from tiny_grpo.config import Config
from tiny_grpo.explorer import Explorer, Probe
from tiny_grpo.placement import actor_options

# A new pod loads torch from its volume before its first answer.
_START_TIMEOUT = 600.0
# Ray restarts a dead explorer, which continues `run`; training does not wait for the restart.
_RESTARTS = 3
# Explorers end soon after training; do not wait longer for a restarting one.
_END_TIMEOUT = 30.0

logger = logging.getLogger(__name__)


class ExplorersGoneError(Exception):
    """No explorer is left to write answers."""


class ExplorerGroup:
    """One Ray actor for each explorer. The group goes on without a dead explorer; an explorer's
    error ends the run."""

    def __init__(self, ctx: RunContext, config: Config) -> None:
        """Create the actors without waiting; see `wait_ready`."""
        actor: Any = ray.remote(Explorer).options(
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            **actor_options(ctx, config, RAY_RESOURCE_EXPLORER),
        )
        self._actors = [actor.remote(ctx, config, index) for index in range(config.explorers)]
        self._running: dict[Any, int] = {}
        self._pids: list[int] = []

    def wait_ready(self) -> None:
        """Wait until every explorer has joined the run."""
        self.pids()

    def pids(self) -> list[int]:
        """The explorers' processes, as they began: one that takes turns answers nothing else."""
        if not self._pids:
            self._pids = ray.get(
                [actor.pid.remote() for actor in self._actors], timeout=_START_TIMEOUT
            )
        return self._pids

    def start(self) -> None:
        """Let every explorer take turns; those that do go on."""
        list(self._ended(0.0))
        takes_turns = set(self._running.values())
        for index, actor in enumerate(self._actors):
            if index not in takes_turns:
                self._running[actor.run.remote()] = index

    def check(self) -> None:
        """Raise an explorer's error; drop a dead explorer from the group.

        Raises:
            ExplorersGoneError: The last explorer died.
        """
        list(self._ended(0.0))
        if not self._running:
            raise ExplorersGoneError("no explorer is left: all of them died")

    def last_probes(self) -> list[Probe]:
        """The probe of the last version, of every explorer that reached the end."""
        return list(self._ended(_END_TIMEOUT))

    def _ended(self, timeout: float) -> Iterator[Probe]:
        running = list(self._running)
        if not running:
            return
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
