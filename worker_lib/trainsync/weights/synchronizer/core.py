"""The Synchronizer's inside: its state, its leases, and what those are told who follow it."""

import asyncio
import atexit
import copy
import logging
import time
from dataclasses import dataclass

from trainsync.api.protocol import WeightsReport
from trainsync.weights.errors import NothingPublishedError
from trainsync.weights.synchronizer.replica import Changes, Journal, Remembered, rebuild
from trainsync.weights.synchronizer.report import weights_report
from trainsync.weights.synchronizer.revision import Revision
from trainsync.weights.synchronizer.state import LEASE_SECONDS, WeightsState
from trainsync.weights.versions import Published

# What was accepted is answered for after this long even if the keeper has not taken it over.
_KEEPER_SECONDS = 2.0
# A loop that woke up later than this slept itself; leases are not to run out for that.
_OVERSLEPT_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contact:
    """How to find the Synchronizer again, and whether somebody rebuilds it."""

    namespace: str
    kept: bool
    lease_seconds: float


class SynchronizerCore:
    """What `Synchronizer` is built on; the arguments are described there."""

    def __init__(
        self,
        namespace: str,
        floor: int = -1,
        lease_seconds: float = LEASE_SECONDS,
        kept: bool = False,
        remembered: Remembered | None = None,
    ) -> None:
        self._contact = Contact(namespace, kept, lease_seconds)
        self._state = (
            WeightsState(floor, lease_seconds=lease_seconds)
            if remembered is None
            else rebuild(remembered, lease_seconds, time.monotonic())
        )
        self._revision = Revision()
        self._journal = Journal()
        self._watch: asyncio.Task[None] | None = None

    async def get_contact(self) -> Contact:
        """Where this actor is found."""
        return self._contact

    async def next_report(
        self,
        seen: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> tuple[int, WeightsReport] | None:
        """What the monitor is to be told, once it is newer than ``seen`` (0 at first).

        Returns its number and the report; None after ``timeout`` seconds, and until a version was
        published, or reached nobody.
        """
        if not await self._revision.wait_for(lambda: self._reportable(seen), timeout):
            return None
        return self._revision.number, weights_report(self._state)

    async def follow(
        self,
        seen: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> Changes | None:
        """What changed after revision ``seen`` (0 at first), for the one that keeps this actor.

        The call says as well that everything up to ``seen`` is kept. None after ``timeout`` s.
        """
        self._journal.taken(seen)
        self._start_watch()
        await self._revision.wake()
        if not await self._revision.wait_for(lambda: self._revision.number > seen, timeout):
            return None
        return Changes(
            self._revision.number,
            self._journal.parts(),
            copy.deepcopy(dict(self._state.explorers)),
            self._state.trainer_status,
            self._state.versions.announced,
            self._state.group,
            self._state.clock.counts,
            dict(self._state.roster.losses),
            self._state.version if self._state.versions.withdrawn else None,
            self._state.versions.missed,
            self._state.traffic,
            dict(self._state.versions.aborted),
        )

    def _reportable(self, seen: int) -> bool:
        return self._revision.number > seen and self._state.versions.offered >= 0

    def _newer(self, version: int) -> bool:
        there = self._state.versions.published is not None and not self._state.versions.withdrawn
        return there and self._state.version > version

    def _published(self) -> Published:
        if self._state.versions.published is None:
            raise NothingPublishedError("no version is published yet")
        return self._state.versions.published

    def _start_watch(self) -> None:
        if self._watch is None:  # the constructor has no running loop
            self._watch = asyncio.create_task(self._watch_leases())
            atexit.register(_end_quietly, asyncio.get_running_loop())

    async def _watch_leases(self) -> None:
        while True:
            expiry = self._state.roster.next_expiry()
            seconds = self._contact.lease_seconds
            if expiry is not None:
                seconds = min(seconds, max(0.01, expiry - time.monotonic()))
            started = time.monotonic()
            await asyncio.sleep(seconds)
            overslept = time.monotonic() - started - seconds
            if overslept > _OVERSLEPT_SECONDS:
                self._state.roster.extend(overslept)
            elif late := self._state.expire(time.monotonic()):
                logger.warning("explorers are lost, no sign of life: %s", ", ".join(late))
                await self._revision.advance()

    async def _kept(self, what: str) -> None:
        """Tell of a change, and wait until whoever keeps this actor has taken it over."""
        await self._revision.advance()
        mine = self._revision.number
        if self._contact.kept and not await self._revision.wait_for(
            lambda: self._journal.followed >= mine, _KEEPER_SECONDS
        ):
            logger.warning("%s: not kept elsewhere in time", what)


def _end_quietly(loop: asyncio.AbstractEventLoop) -> None:
    """Let what waits go with the process without "Task was destroyed but it is pending".

    Not cancelled: callers would hear of a cancellation, and are to hear that the actor is gone.
    """
    for task in asyncio.all_tasks(loop):
        setattr(task, "_log_destroy_pending", False)  # noqa: B010 - a type checker forbids it plain
