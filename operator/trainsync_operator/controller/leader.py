"""Leader election by a Lease."""

import asyncio
import logging
from collections.abc import Callable

from trainsync.kube.client import KubeError, Object
from trainsync.kube.lease import GIVE_UP_SECONDS, RENEW_SECONDS, LeaseLock

from trainsync_operator.kube.client import Api
from trainsync_operator.kube.kinds import LEASE

_LOG = logging.getLogger(__name__)


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
            await asyncio.sleep(RENEW_SECONDS)

    async def keep(self) -> None:
        """Renew the Lease until a renewal fails for too long.

        Raises:
            LeadershipLostError: stop at once.
        """
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            left = GIVE_UP_SECONDS - (self._clock() - self._renewed)
            if left <= 0:
                raise LeadershipLostError(f"Lease {self._name} was not renewed in time")
            try:
                async with asyncio.timeout(left):
                    if not await self.try_once():
                        raise LeadershipLostError(f"Lease {self._name} was taken by another")
            except (KubeError, TimeoutError) as error:
                _LOG.warning("Lease %s not renewed: %s", self._name, error or "too slow")

    async def release(self) -> None:
        """Release the Lease, so that a successor need not wait for its expiry; best effort."""
        try:
            await self._lock.release()
        except KubeError as error:
            _LOG.warning("Lease %s not released: %s", self._name, error)
