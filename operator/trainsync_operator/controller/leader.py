"""Leader election by a Lease.

Our own few lines rather than the client library's: that one sets no deadline on its calls, ends on
a lost connection, and writes local time as UTC.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from trainsync_operator.kube.client import Api, ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import LEASE
from trainsync_operator.kube.objects import Object

_LOG = logging.getLogger(__name__)
LEASE_SECONDS: Final = 15
RENEW_SECONDS: Final = 3.0
# Without a renewal for so long we stop, before another may start.
GIVE_UP_SECONDS: Final = 10.0


class LeadershipLostError(Exception):
    """Somebody else leads, or the Lease could not be renewed in time."""


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Elector:
    """Holds, or waits for, one Lease under one identity."""

    api: Api
    namespace: str
    name: str
    identity: str
    clock: Callable[[], float]
    # Another's Lease is judged by when *we* saw it change: clocks differ.
    _seen: tuple[Any, ...] = ()
    _seen_at: float = 0.0

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = _micro_time()
        ours = before.get("holderIdentity") == self.identity
        turns = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": turns if ours or not before else turns + 1,
        }

    def _free(self, spec: dict[str, Any]) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self.identity:
            return True
        seen = (holder, spec.get("renewTime"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self.clock()
        return self.clock() - self._seen_at > int(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    async def try_once(self) -> bool:
        """Take or renew the Lease; False when another holds it.

        Raises:
            ApiError: unknown; ask again.
        """
        lease: Object | None = await self.api.get(LEASE, self.namespace, self.name)
        try:
            if lease is None:
                body = {
                    "apiVersion": LEASE.api_version,
                    "kind": LEASE.name,
                    "metadata": {"name": self.name, "namespace": self.namespace},
                    "spec": self._spec({}),
                }
                await self.api.create(LEASE, body)
                return True
            if not self._free(lease.get("spec") or {}):
                return False
            # The resourceVersion we read makes the API server refuse the slower of two.
            await self.api.replace(LEASE, {**lease, "spec": self._spec(lease.get("spec") or {})})
        except ApiRefusedError as error:
            if error.status == 409:
                return False
            raise
        return True

    async def acquire(self) -> None:
        """Wait until we lead."""
        while True:
            try:
                if await self.try_once():
                    _LOG.info("leading as %s", self.identity)
                    return
            except ApiError as error:
                _LOG.warning("Lease %s/%s: %s", self.namespace, self.name, error)
            await asyncio.sleep(RENEW_SECONDS)

    async def keep(self) -> None:
        """Renew for as long as it works.

        Raises:
            LeadershipLostError: stop at once.
        """
        renewed = self.clock()
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            left = GIVE_UP_SECONDS - (self.clock() - renewed)
            if left <= 0:
                raise LeadershipLostError(f"Lease {self.name} was not renewed in time")
            try:
                async with asyncio.timeout(left):
                    if not await self.try_once():
                        raise LeadershipLostError(f"Lease {self.name} was taken by another")
                renewed = self.clock()
            except (ApiError, TimeoutError) as error:
                _LOG.warning("Lease %s not renewed: %s", self.name, error or "too slow")

    async def release(self) -> None:
        """Give the Lease up, so that a successor need not wait; best effort."""
        try:
            lease = await self.api.get(LEASE, self.namespace, self.name)
            spec = (lease or {}).get("spec") or {}
            if lease and spec.get("holderIdentity") == self.identity:
                await self.api.replace(LEASE, {**lease, "spec": {**spec, "holderIdentity": ""}})
        except ApiError as error:
            _LOG.warning("Lease %s not released: %s", self.name, error)
