"""The Synchronizer's state in its actor: waited for, followed by the failover, its leases timed."""

import asyncio
import atexit
import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainsync.weights.synchronizer.failover_state import (
    PartJournal,
    RestoredState,
    StateChanges,
    rebuild,
)
from trainsync.weights.synchronizer.state import WeightsState
from trainsync.weights.versions import HeldPart

# A change is answered for after this long even if the follower has not taken it over.
_FOLLOWER_SECONDS: Final = 2.0
# A loop that woke up later than this slept itself; leases are not to run out for that.
_OVERSLEPT_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contact:
    """How to find the Synchronizer again, and whether it is rebuilt when it dies (``kept``).

    ``restarts`` of the trainers in place came before.
    """

    namespace: str
    kept: bool
    lease_seconds: float
    restarts: int = 0


class Revision:
    """Counts changes, and wakes the calls that wait for one. For one event loop."""

    def __init__(self) -> None:
        self.number = 0
        self.wakes = 0
        self._changed = asyncio.Condition()

    async def advance(self) -> None:
        """Something has changed."""
        self.number += 1
        await self.wake()

    async def wake(self) -> None:
        """Let every waiting call look again, though the number stays."""
        self.wakes += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until ``condition()``, which is asked after each change; False after ``seconds``."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True


class FollowedState:
    """The state of one actor; the arguments are those of `Synchronizer`.

    Attributes:
        contact: how to find the actor.
        state: changed by the actor's calls, which then `keep` the change or advance the revision.
        revision: of the state.
    """

    def __init__(
        self,
        namespace: str,
        floor: int,
        lease_seconds: float,
        kept: bool,
        remembered: RestoredState | None,
    ) -> None:
        self.contact = Contact(namespace, kept, lease_seconds)
        self.state = (
            WeightsState(floor, lease_seconds=lease_seconds)
            if remembered is None
            else rebuild(remembered, lease_seconds, time.monotonic())
        )
        self.revision = Revision()
        self._journal = PartJournal()
        self._watch: asyncio.Task[None] | None = None

    async def keep(self, change: str, part: HeldPart | None = None) -> bool:
        """Advance the revision, and wait until the follower, if there is one, has the change.

        False when the follower did not take it in time.

        Args:
            change: for the warning that the follower did not take it in time.
            part: that was accepted.
        """
        if part is not None and self.contact.kept:
            self._journal.add(self.revision.number + 1, part, self.state.version)
        await self.revision.advance()
        mine = self.revision.number
        if self.contact.kept and not await self.revision.wait_for(
            lambda: self._journal.followed >= mine, _FOLLOWER_SECONDS
        ):
            logger.warning("%s: no follower has the change in time", change)
            return False
        return True

    def rewind(self, number: int, step: int) -> bool:
        """See `WeightsState.rewind`; the change is yet to be kept."""
        if not self.state.rewind(number, step):
            return False
        self._journal.clear()  # of versions that are no more, or whose bytes may be gone
        return True

    async def follow(self, seen: int, seconds: float) -> StateChanges | None:
        """The changes after revision ``seen``, which the follower has; None after ``seconds``."""
        self._journal.taken(seen)
        self.watch_leases()
        await self.revision.wake()
        if not await self.revision.wait_for(lambda: self.revision.number > seen, seconds):
            return None
        state = self.state
        return StateChanges(
            revision=self.revision.number,
            parts=self._journal.parts(),
            explorers=copy.deepcopy(dict(state.explorers)),
            trainer_status=state.trainer_status,
            announced=state.versions.announced,
            group=state.group,
            counts=state.clock.counts,
            losses=dict(state.roster.losses),
            withdrawn=state.version if state.versions.withdrawn else None,
            missed=state.versions.missed,
            traffic=state.traffic,
            aborted=dict(state.versions.aborted),
            rewinds=state.rewinds,
            restarts=state.versions.restarts,
            reopened=state.versions.reopened,
        )

    def watch_leases(self) -> None:
        """From now on give up explorers whose lease runs out. Needs the running loop."""
        if self._watch is None:  # the constructor has no running loop
            self._watch = asyncio.create_task(self._expire_leases())
            atexit.register(_end_quietly, asyncio.get_running_loop())

    async def _expire_leases(self) -> None:
        while True:
            expiry = self.state.roster.next_expiry()
            seconds = self.contact.lease_seconds
            if expiry is not None:
                seconds = min(seconds, max(0.01, expiry - time.monotonic()))
            started = time.monotonic()
            await asyncio.sleep(seconds)
            overslept = time.monotonic() - started - seconds
            if overslept > _OVERSLEPT_SECONDS:
                self.state.roster.extend(overslept)
            elif late := self.state.expire(time.monotonic()):
                logger.warning("explorers are lost, no sign of life: %s", ", ".join(late))
                await self.revision.advance()


def _end_quietly(loop: asyncio.AbstractEventLoop) -> None:
    """Let what waits go with the process without "Task was destroyed but it is pending".

    Not cancelled: callers would hear of a cancellation, and are to hear that the actor is gone.
    """
    for task in asyncio.all_tasks(loop):
        setattr(task, "_log_destroy_pending", False)  # noqa: B010 - a type checker forbids it plain
