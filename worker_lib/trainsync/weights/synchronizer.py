"""The Synchronizer: one async Ray actor through which new weights reach the explorers.

Its event loop does no I/O and touches no tensor: it holds references into Ray's object store and
answers questions about them. What it decides is in `trainsync.weights.state`.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from trainsync.api.protocol import WeightsReport
from trainsync.weights.errors import (
    NothingPublishedError,
    WeightsTimeoutError,
    WeightsUnavailableError,
)
from trainsync.weights.liveness import REQUIRE_SYNC, STOPPED, Serving
from trainsync.weights.replica import Changes, Journal, Remembered, rebuild
from trainsync.weights.reporting import SynchronizerStatus, snapshot, weights_report
from trainsync.weights.state import LEASE_SECONDS, WeightsState
from trainsync.weights.versions import HeldPart, PartMeta, Published, VersionMeta

ACTOR_NAME = "trainsync-synchronizer"

# A part is answered for after this long even if the keeper has not taken it over.
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


class Synchronizer:
    """Versions of the weights, and who has which. Use it through its actor handle.

    Args:
        floor: versions must be greater; see `WeightsState`.
        lease_seconds: how long an explorer may be silent before it is given up.
        kept: somebody follows this actor, and rebuilds it when it dies.
        remembered: what an earlier actor held; then ``floor`` is not used.
    """

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
        self._changed = asyncio.Condition()
        self._revision = 0
        self._journal = Journal()
        self._watch: asyncio.Task[None] | None = None

    # -- making and finding the actor -------------------------------------------------------

    @staticmethod
    def create(namespace: str, floor: int = -1, lease_seconds: float = LEASE_SECONDS) -> Any:
        """The handle of the namespace's Synchronizer, which is made if there is none.

        It takes no CPU and ends with the job that made it. Nobody rebuilds it when it dies: see
        `SynchronizerKeeper` for one that lives on.
        """
        actor = ray.remote(Synchronizer).options(
            name=ACTOR_NAME, namespace=namespace, get_if_exists=True, num_cpus=0
        )
        return actor.remote(namespace, floor, lease_seconds)

    @staticmethod
    def get_actor(namespace: str, timeout: float = 60.0) -> Any:
        """The handle of the namespace's Synchronizer.

        Raises:
            WeightsUnavailableError: there was none within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return ray.get_actor(ACTOR_NAME, namespace=namespace)
            except ValueError as error:
                if time.monotonic() >= deadline:
                    raise WeightsUnavailableError(
                        f"no Synchronizer in Ray namespace {namespace!r} after {timeout:g} s; "
                        "the job's driver makes it with RunContext.synchronizer()"
                    ) from error
                time.sleep(0.1)

    async def get_contact(self) -> Contact:
        """Where this actor is found."""
        return self._contact

    # -- the trainer's side ---------------------------------------------------------------

    async def set_model_state_dict(
        self, refs: Sequence[Any], version: int, part: PartMeta, again: bool = False
    ) -> bool:
        """Take one trainer rank's part; True when the version is complete and published.

        A part that was answered for outlives this actor, if it is kept.

        Args:
            refs: one object reference to the part's uint8 array, in a list: Ray would replace a
                bare reference by the object itself.
            again: the answer to an earlier call was lost: the same part is no error.

        Raises:
            StaleVersionError, InconsistentUploadError.
        """
        (ref,) = refs
        complete = self._state.upload(version, part, ref, time.monotonic(), again=again)
        revision = self._revision + 1
        if self._contact.kept:
            self._journal.add(revision, HeldPart(version, part, ref), self._state.version)
        await self._notify()
        if self._contact.kept and not await self._wait_for(
            lambda: self._journal.followed >= revision, _KEEPER_SECONDS
        ):
            logger.warning("version %d, rank %d: not kept elsewhere in time", version, part.rank)
        return complete

    async def set_trainer_status(self, status: str) -> None:
        """``running``, ``require_sync`` or ``stopped``; the last ends every wait."""
        self._state.set_trainer_status(status)
        await self._notify()

    # -- the explorers' side ----------------------------------------------------------------

    async def register_explorer(
        self, explorer: str, session: str, rejoin: bool = False, serving: Serving | None = None
    ) -> int:
        """An explorer joins; returns the newest version.

        Args:
            session: random name of the process. A new one replaces the one before; it is lost, too,
                when it does not speak for a lease.
            rejoin: the process was here before, and goes on with what it is ``serving``.

        Raises:
            ExplorerReplacedError: it rejoins, but another process lives under this id.
        """
        now = time.monotonic()
        if rejoin:
            self._state.rejoin(explorer, session, serving, now)
        else:
            self._state.register(explorer, session, now)
        self._start_watch()
        await self._notify()
        return self._state.version

    async def renew(self, explorer: str, session: str, serving: Serving | None = None) -> None:
        """The explorer lives, and serves this. Raises what `WeightsState.renew` raises."""
        if self._state.renew(explorer, session, time.monotonic(), serving):
            await self._notify()

    async def leave(self, explorer: str, session: str | None = None) -> None:
        """An explorer goes, or is taken off the list by somebody else."""
        self._state.leave(explorer, time.monotonic(), session)
        await self._notify()

    async def quarantine(self, explorer: str, cause: str) -> None:
        """Give an explorer up, say because it did not take a version in time.

        It is told when it next speaks, may rejoin, and is waited for again when it serves the
        published version. Raises `UnknownExplorerError`.
        """
        self._state.give_up(explorer, cause, time.monotonic())
        await self._notify()

    async def set_explorer_status(self, explorer: str, session: str, status: str) -> None:
        """``running``, ``require_sync`` or ``stopped``."""
        self._state.set_explorer_status(explorer, session, status, time.monotonic())
        await self._notify()

    async def wait_new_model_state_dict(
        self,
        current_version: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
        explorer: str | None = None,
        session: str = "",
    ) -> int | None:
        """Wait until a version newer than ``current_version`` is published, and return it.

        Returns None when the trainer has stopped, so that none will come. A named explorer counts
        as ``require_sync`` until it acknowledges.

        Raises:
            WeightsTimeoutError: none came within ``timeout`` seconds.
        """
        if explorer is not None:
            await self.set_explorer_status(explorer, session, REQUIRE_SYNC)

        if not await self._wait_for(
            lambda: self._newer(current_version) or self._state.trainer_status == STOPPED, timeout
        ):
            raise WeightsTimeoutError(
                f"no version newer than {current_version} within {timeout:g} s; the newest is "
                f"{self._state.version}"
            )
        return self._state.version if self._newer(current_version) else None

    async def get_model_state_dict(self) -> Published:
        """The published version: its description and the references to its parts.

        Raises:
            NothingPublishedError.
        """
        return self._published()

    async def get_state_dict_meta(self) -> VersionMeta:
        """The published version's description alone. Raises `NothingPublishedError`."""
        return self._published().meta

    async def acknowledge(self, explorer: str, session: str, version: int, digest: str) -> None:
        """The explorer serves ``version``, whose digest it checked."""
        try:
            self._state.acknowledge(explorer, session, version, digest, time.monotonic())
        finally:
            await self._notify()

    # -- everybody's ----------------------------------------------------------------------

    async def get_status(self) -> SynchronizerStatus:
        """Who has what."""
        return snapshot(self._state)

    async def wait_acknowledged(
        self,
        version: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> bool:
        """Wait until every explorer that takes part serves ``version`` or a newer one.

        Those that stopped, were lost, or came back and have not caught up do not take part. False
        after ``timeout`` seconds.
        """
        return await self._wait_for(lambda: not self._state.roster.behind(version), timeout)

    async def next_report(
        self,
        seen: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> tuple[int, WeightsReport] | None:
        """What the monitor is to be told, once it is newer than ``seen`` (0 at first).

        Returns its number and the report; None after ``timeout`` seconds, and until a version is
        published.
        """
        if not await self._wait_for(lambda: self._reportable(seen), timeout):
            return None
        return self._revision, weights_report(self._state)

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
        await self._wake()
        if not await self._wait_for(lambda: self._revision > seen, timeout):
            return None
        return Changes(
            self._revision,
            self._journal.parts(),
            copy.deepcopy(dict(self._state.explorers)),
            self._state.trainer_status,
        )

    def _reportable(self, seen: int) -> bool:
        return self._revision > seen and self._state.published is not None

    def _newer(self, version: int) -> bool:
        return self._state.published is not None and self._state.version > version

    def _published(self) -> Published:
        if self._state.published is None:
            raise NothingPublishedError("no version is published yet")
        return self._state.published

    def _start_watch(self) -> None:
        if self._watch is None:  # the constructor has no running loop
            self._watch = asyncio.create_task(self._watch_leases())

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
                await self._notify()

    async def _notify(self) -> None:
        self._revision += 1
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True
