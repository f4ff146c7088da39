"""The Lease that lets one monitor of a run, and only one, change what is committed."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.kube.client import KubeApi, KubeError, Object

_LOG = logging.getLogger(__name__)

LEASE_SECONDS: Final = 15
RENEW_SECONDS: Final = 3.0
# Without a renewal for so long we stop committing, well before a successor may start.
GIVE_UP_SECONDS: Final = 10.0


class Lease:
    """Takes and renews the Lease; `gate` is asked before everything that commits.

    `gate` and `term` may be called from any thread.

    Args:
        identity: unique to this pod. A container that restarts in its pod keeps it, and need not
            wait for its own Lease to run out.
        owner: ownerReference of the Lease, so that it goes with the run.
        on_won: called each time it was won.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        name: str,
        namespace: str,
        identity: str,
        owner: Mapping[str, Any],
        on_won: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._metadata = {"name": name, "namespace": namespace, "ownerReferences": [dict(owner)]}
        self._identity = identity
        self._on_won = on_won
        self._clock = clock
        self._now = now
        self._valid_until = float("-inf")
        self._term = 0
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    def gate(self) -> None:
        """Pass while the Lease is held.

        Raises:
            NotReadyError: it is not.
        """
        if not self.held:
            raise NotReadyError(
                "this monitor does not hold its Lease: another one does, or the API server is away"
            )

    @property
    def held(self) -> bool:
        """Whether the Lease is ours for sure."""
        return self._clock() < self._valid_until

    def term(self) -> int:
        """How often the Lease was won; another one may have committed in between."""
        return self._term

    async def run(self) -> None:
        """Take, renew and take again, until cancelled."""
        while True:
            await self.try_once()
            await asyncio.sleep(RENEW_SECONDS)

    async def try_once(self) -> bool:
        """Take or renew; whether it is ours."""
        asked_at = self._clock()
        was_held = self.held
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                ours = await self._take()
        except (KubeError, TimeoutError) as error:
            _LOG.warning("Lease %s: %s", self._metadata["name"], error or "too slow")
            return self.held
        if not ours:
            self._valid_until = float("-inf")
            if was_held:
                _LOG.error("Lease %s was taken by another", self._metadata["name"])
            return False
        lapsed = not self.held  # before we asked, or while we waited for the answer
        if lapsed:
            self._term += 1
        # Counted from before the request: a successor counts from when it saw the renewal.
        self._valid_until = asked_at + GIVE_UP_SECONDS
        if lapsed:
            _LOG.info("Lease %s held as %s", self._metadata["name"], self._identity)
            self._on_won()
        return True

    async def release(self) -> None:
        """Give it up, so that a successor need not wait; best effort."""
        if not self.held:
            return
        self._valid_until = float("-inf")
        try:
            lease = await self._api.get_lease()
            spec = (lease or {}).get("spec") or {}
            if lease and spec.get("holderIdentity") == self._identity:
                await self._api.replace_lease({**lease, "spec": {**spec, "holderIdentity": ""}})
        except KubeError as error:
            _LOG.warning("Lease %s not released: %s", self._metadata["name"], error)

    async def _take(self) -> bool:
        lease: Object | None = await self._api.get_lease()
        try:
            if lease is None:
                await self._api.create_lease(
                    {
                        "apiVersion": "coordination.k8s.io/v1",
                        "kind": "Lease",
                        "metadata": self._metadata,
                        "spec": self._spec({}),
                    }
                )
                return True
            spec = lease.get("spec") or {}
            if not self._free(spec):
                return False
            metadata = {
                **lease["metadata"],
                "ownerReferences": self._metadata["ownerReferences"],
            }
            # The resourceVersion we read makes the API server refuse the slower of two.
            await self._api.replace_lease({**lease, "metadata": metadata, "spec": self._spec(spec)})
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        return True

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
        turns = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": turns if ours or not before else turns + 1,
        }
