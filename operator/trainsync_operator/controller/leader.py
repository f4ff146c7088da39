"""Leader election by a Lease."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

from trainsync.kube.client import KubeError, Object
from trainsync.kube.lease import (
    GIVE_UP_SECONDS,
    LEASE_SECONDS,
    LOOK_SECONDS,
    RENEW_SECONDS,
    TRY_SECONDS,
    LeaseLock,
)

from trainsync_operator.kube.client import Api
from trainsync_operator.kube.kinds import LEASE

_LOG = logging.getLogger(__name__)
_RELEASE_SECONDS: Final = 5.0


class LeadershipLostError(Exception):
    """Another operator leads, or the Lease could not be renewed in time."""


class _Store:
    """The Lease ``namespace``/``name`` over the operator's client."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name

    async def get_lease(self) -> Object | None:
        return await self._api.get(LEASE, self._namespace, self._name)

    async def create_lease(self, lease: Object) -> Object:
        return await self._api.create(LEASE, lease)

    async def replace_lease(self, lease: Object) -> Object:
        return await self._api.replace(LEASE, lease)


class Elector:
    """Acquires and renews one Lease under one identity."""

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, clock: Callable[[], float]
    ) -> None:
        store = _Store(api, namespace, name)
        self._lock = LeaseLock(store, {"name": name, "namespace": namespace}, identity, clock)
        self._name = f"{namespace}/{name}"
        self._identity = identity
        self._clock = clock
        self._renewed = 0.0

    async def try_once(self) -> bool:
        """Take or renew the Lease; False when another holds it.

        Raises:
            KubeError: unknown; ask again.
        """
        asked_at = self._clock()
        if not await self._lock.take():
            return False
        # Time before the request: a successor counts from its first sight of the renewal, which is
        # later.
        self._renewed = asked_at
        return True

    async def acquire(self) -> None:
        """Wait until we lead."""
        while True:
            try:
                if await self.try_once():
                    _LOG.info("leading as %s", self._identity)
                    return
            except KubeError as error:
                _LOG.warning("Lease %s: %s", self._name, error)
            await asyncio.sleep(LOOK_SECONDS)

    async def keep(self) -> None:
        """Renew the Lease until a renewal fails for too long.

        Raises:
            LeadershipLostError: stop at once.
        """
        while True:
            await asyncio.sleep(min(RENEW_SECONDS, self._left()))
            left = self._left()
            if left <= 0:
                raise LeadershipLostError(f"Lease {self._name} was not renewed in time")
            try:
                async with asyncio.timeout(min(left, TRY_SECONDS)):
                    if not await self.try_once():
                        raise LeadershipLostError(f"Lease {self._name} was taken by another")
            except (KubeError, TimeoutError) as error:
                _LOG.warning("Lease %s not renewed: %s", self._name, str(error) or "too slow")

    def _left(self) -> float:
        return max(0.0, GIVE_UP_SECONDS - (self._clock() - self._renewed))

    async def release(self) -> None:
        """Release the Lease, so that a successor need not wait for its expiry; best effort."""
        try:
            await self._lock.release()
        except KubeError as error:
            _LOG.warning("Lease %s not released: %s", self._name, error)


def _end_process() -> None:
    os._exit(1)


class Leadership:
    """Holds the Lease in a thread of its own, with an event loop and a connection of its own.

    So a busy operator renews in time. When the Lease is lost, the operator has until a successor
    may start to stop its workers; then the process ends, however busy it is.

    Args:
        elector: opened in the thread.
        end: ends the process.
    """

    def __init__(
        self,
        elector: Callable[[], AbstractAsyncContextManager[Elector]],
        end: Callable[[], None] = _end_process,
    ) -> None:
        self._open = elector
        self._end = end
        self._operator = asyncio.get_running_loop()
        self._acquired: asyncio.Future[None] = self._operator.create_future()
        self._lost: asyncio.Future[None] = self._operator.create_future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    async def acquire(self) -> None:
        """Wait until we lead.

        Raises:
            Exception: the connection could not be made.
        """
        self._thread.start()
        await self._acquired

    async def lost(self) -> None:
        """Wait until we do not lead any more.

        Raises:
            LeadershipLostError: stop at once.
        """
        await self._lost

    async def release(self) -> None:
        """Give the Lease up; nothing of the operator writes any more. Best effort."""
        self._stopped.set()
        with contextlib.suppress(RuntimeError):  # the thread has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, _RELEASE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._hold())
        except Exception as error:  # noqa: BLE001 -- handed to the operator's loop
            self._tell(partial(self._fail, error))
            if not self._stopped.wait(LEASE_SECONDS - GIVE_UP_SECONDS):
                _LOG.error("workers did not stop before the Lease ran out: ending the process")
                self._end()
        finally:
            self._loop.close()

    def _tell(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the operator's loop is closed
            self._operator.call_soon_threadsafe(what)

    def _fail(self, error: Exception) -> None:
        future = self._lost if self._acquired.done() else self._acquired
        if not future.done():
            future.set_exception(error)

    def _lead(self) -> None:
        if not self._acquired.done():
            self._acquired.set_result(None)

    async def _hold(self) -> None:
        async with self._open() as elector:
            holding = asyncio.create_task(self._keep(elector))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({holding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            holding.cancel()
            try:
                await holding
            except asyncio.CancelledError:
                await elector.release()

    async def _keep(self, elector: Elector) -> None:
        await elector.acquire()
        self._tell(self._lead)
        await elector.keep()
