"""The Synchronizer: one async Ray actor through which new weights reach the explorers.

Its event loop does no I/O and touches no tensor: it holds references into Ray's object store and
answers questions about them. What it decides is in `trainsync.weights.state`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from trainsync.api.protocol import ExplorerReport, WeightsReport
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.state import (
    REQUIRE_SYNC,
    STOPPED,
    PartMeta,
    Published,
    VersionMeta,
    WeightsState,
)

ACTOR_NAME = "trainsync-synchronizer"
METHOD = "memory"

_MAX_REPORTED = 256  # as the wire protocol allows; those furthest behind come first


@dataclass(frozen=True)
class ExplorerSnapshot:
    """One explorer as the Synchronizer sees it; ``lag`` is in training steps."""

    version: int
    lag: int
    status: str


@dataclass(frozen=True)
class SynchronizerStatus:
    """What `Synchronizer.get_status` answers."""

    version: int
    trainer_status: str
    last_duration_seconds: float | None
    last_bytes: int | None
    explorers: dict[str, ExplorerSnapshot]


class Synchronizer:
    """Versions of the weights, and who has which. Use it through its actor handle.

    Args:
        floor: versions must be greater; see `WeightsState`.
    """

    def __init__(self, floor: int = -1) -> None:
        self._state = WeightsState(floor)
        self._changed = asyncio.Condition()
        self._revision = 0

    # -- making and finding the actor -------------------------------------------------------

    @staticmethod
    def create(namespace: str, floor: int = -1) -> Any:
        """The handle of the namespace's Synchronizer, which is made if there is none.

        It takes no CPU and ends with the job that made it.
        """
        actor = ray.remote(Synchronizer).options(
            name=ACTOR_NAME, namespace=namespace, get_if_exists=True, num_cpus=0
        )
        return actor.remote(floor)

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

    # -- the trainer's side ---------------------------------------------------------------

    async def set_model_state_dict(self, refs: Sequence[Any], version: int, part: PartMeta) -> bool:
        """Take one trainer rank's part; True when the version is complete and published.

        Args:
            refs: one object reference to the part's uint8 array, in a list: Ray would replace a
                bare reference by the object itself.

        Raises:
            StaleVersionError, InconsistentUploadError.
        """
        (ref,) = refs
        complete = self._state.upload(version, part, ref, time.monotonic())
        await self._notify()
        return complete

    async def set_trainer_status(self, status: str) -> None:
        """``running``, ``require_sync`` or ``stopped``; the last ends every wait."""
        self._state.set_trainer_status(status)
        await self._notify()

    # -- the explorers' side ----------------------------------------------------------------

    async def register_explorer(self, explorer: str) -> int:
        """An explorer joins; returns the newest version."""
        self._state.register(explorer)
        await self._notify()
        return self._state.version

    async def leave(self, explorer: str) -> None:
        """An explorer goes."""
        self._state.leave(explorer, time.monotonic())
        await self._notify()

    async def set_explorer_status(self, explorer: str, status: str) -> None:
        """``running``, ``require_sync`` or ``stopped``."""
        self._state.set_explorer_status(explorer, status)
        await self._notify()

    async def wait_new_model_state_dict(
        self,
        current_version: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
        explorer: str | None = None,
    ) -> int | None:
        """Wait until a version newer than ``current_version`` is published, and return it.

        Returns None after ``timeout`` seconds, or when the trainer has stopped. A named explorer
        counts as ``require_sync`` until it acknowledges.
        """
        if explorer is not None:
            self._state.set_explorer_status(explorer, REQUIRE_SYNC)
            await self._notify()

        await self._wait_for(
            lambda: self._newer(current_version) or self._state.trainer_status == STOPPED, timeout
        )
        return self._state.version if self._newer(current_version) else None

    async def get_model_state_dict(self) -> Published:
        """The published version: its description and the references to its parts.

        Raises:
            WeightsUnavailableError: nothing is published yet.
        """
        return self._published()

    async def get_state_dict_meta(self) -> VersionMeta:
        """The published version's description alone. Raises `WeightsUnavailableError`."""
        return self._published().meta

    async def acknowledge(self, explorer: str, version: int, digest: str) -> None:
        """The explorer serves ``version``, whose digest it checked.

        Raises:
            UnknownExplorerError, StaleVersionError, DigestMismatchError.
        """
        try:
            self._state.acknowledge(explorer, version, digest, time.monotonic())
        finally:
            await self._notify()

    # -- everybody's ----------------------------------------------------------------------

    async def get_status(self) -> SynchronizerStatus:
        """Who has what."""
        state = self._state
        return SynchronizerStatus(
            version=state.version,
            trainer_status=state.trainer_status,
            last_duration_seconds=state.last_duration,
            last_bytes=None if state.published is None else state.published.meta.bytes,
            explorers={
                name: ExplorerSnapshot(e.version, state.lag(name), e.status)
                for name, e in state.explorers.items()
            },
        )

    async def wait_acknowledged(
        self,
        version: int,
        timeout: float,  # noqa: ASYNC109 - the caller is in another process
    ) -> bool:
        """Wait until every explorer that has not stopped serves ``version`` or a newer one.

        False after ``timeout`` seconds: an explorer that is gone must not hang the trainer.
        """

        def served() -> bool:
            explorers = self._state.explorers.values()
            return all(e.version >= version for e in explorers if e.status != STOPPED)

        return await self._wait_for(served, timeout)

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

    def _reportable(self, seen: int) -> bool:
        return self._revision > seen and self._state.published is not None

    def _newer(self, version: int) -> bool:
        return self._state.published is not None and self._state.version > version

    def _published(self) -> Published:
        if self._state.published is None:
            raise WeightsUnavailableError("no version is published yet")
        return self._state.published

    async def _notify(self) -> None:
        async with self._changed:
            self._revision += 1
            self._changed.notify_all()

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True


def weights_report(state: WeightsState) -> WeightsReport:
    """What the monitor is told. Needs a published version."""
    if state.published is None:
        raise WeightsUnavailableError("no version is published yet")
    furthest_behind = sorted(state.explorers.items(), key=lambda item: (item[1].version, item[0]))
    return WeightsReport(
        trainer_version=state.version,
        method=METHOD,
        last_duration_seconds=state.last_duration,
        last_bytes=state.published.meta.bytes,
        explorers=[
            ExplorerReport(id=name, version=explorer.version, state=explorer.status)
            for name, explorer in furthest_behind[:_MAX_REPORTED]
        ],
    )
