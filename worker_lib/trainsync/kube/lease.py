"""A Lease of Kubernetes: one holder at a time.

Our own few lines rather than the client library's: that one sets no deadline on its calls, ends on
a lost connection, and writes local time as UTC.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from trainsync.kube.client import KubeError, Object

LEASE_SECONDS: Final = 12
RENEW_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 1.0
"""Between two looks of a candidate, which leads at most 15 s after the holder has died."""
TRY_SECONDS: Final = 3.0
"""For one renewal: an answer that was lost is not to cost the Lease."""
# Without a renewal for so long the holder stops, well before a successor may start.
GIVE_UP_SECONDS: Final = 8.0


class LeaseStore(Protocol):
    """Reads and writes one Lease. Every call has a deadline and may raise `KubeError`."""

    async def get_lease(self) -> Object | None:
        """The Lease, None when there is none."""
        ...

    async def create_lease(self, lease: Object) -> Object:
        """Make the Lease; 409 when it is there."""
        ...

    async def replace_lease(self, lease: Object) -> Object:
        """Put a Lease of a known resourceVersion; 409 when it has changed."""
        ...


class LeaseLock:
    """Takes, renews and releases one Lease under one identity.

    A holder counts the time that it holds the Lease from *before* it asks for a renewal: a
    successor counts from when the successor saw that renewal, which is later.

    Args:
        metadata: the Lease's name and namespace, and its ownerReferences, if any.
        identity: unique to the holder. A container that restarts in its pod keeps it, and need not
            wait for its own Lease to run out.
        clock: seconds, of any beginning.
        now: for the times written into the Lease, which other holders do not rely on.
    """

    def __init__(
        self,
        store: LeaseStore,
        metadata: Mapping[str, Any],
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._metadata = dict(metadata)
        self._identity = identity
        self._clock = clock
        self._now = now
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    async def take(self) -> bool:
        """Take or renew the Lease; False when another holds it.

        Raises:
            KubeError: whether it is ours is not known.
        """
        lease = await self._store.get_lease()
        try:
            if lease is None:
                body = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": self._metadata,
                    "spec": self._spec({}),
                }
                await self._store.create_lease(body)
                return True
            spec = lease.get("spec") or {}
            if not self._free(spec):
                return False
            metadata = {**lease["metadata"], **self._metadata}
            # The resourceVersion we read makes the API server refuse the slower of two.
            await self._store.replace_lease(
                {**lease, "metadata": metadata, "spec": self._spec(spec)}
            )
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        return True

    async def release(self) -> None:
        """Give the Lease up if it is ours, so that a successor need not wait.

        Raises:
            KubeError: the API server was not reached, or refused.
        """
        lease = await self._store.get_lease()
        spec = (lease or {}).get("spec") or {}
        if lease and spec.get("holderIdentity") == self._identity:
            await self._store.replace_lease({**lease, "spec": {**spec, "holderIdentity": ""}})

    def _free(self, spec: Mapping[str, Any]) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        seen = (holder, spec.get("renewTime"))
        if seen != self._seen:  # judged by when *we* saw it change: clocks differ
            self._seen, self._seen_at = seen, self._clock()
        return self._clock() - self._seen_at > int(
            spec.get("leaseDurationSeconds") or LEASE_SECONDS
        )

    def _spec(self, before: Mapping[str, Any]) -> dict[str, Any]:
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": transitions if ours or not before else transitions + 1,
        }
