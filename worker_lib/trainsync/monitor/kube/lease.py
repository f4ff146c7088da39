"""The Lease that lets one monitor of a run, and only one, change what is committed."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from trainsync.kube.client import KubeError
from trainsync.kube.lease import (
    GIVE_UP_SECONDS,
    LOOK_SECONDS,
    RENEW_SECONDS,
    TRY_SECONDS,
    LeaseLock,
    LeaseStore,
)
from trainsync.monitor.errors import NotReadyError

_LOG = logging.getLogger(__name__)


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
        store: LeaseStore,
        *,
        name: str,
        namespace: str,
        identity: str,
        owner: Mapping[str, Any],
        on_won: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._name = name
        metadata = {"name": name, "namespace": namespace, "ownerReferences": [dict(owner)]}
        self._lock = LeaseLock(store, metadata, identity, clock, now)
        self._identity = identity
        self._on_won = on_won
        self._clock = clock
        self._valid_until = float("-inf")
        self._term = 0

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
        """How many times the Lease was won; another monitor may have committed in between."""
        return self._term

    async def run(self) -> None:
        """Take, renew and take again, until cancelled."""
        while True:
            held = await self.try_once()
            await asyncio.sleep(RENEW_SECONDS if held else LOOK_SECONDS)

    async def try_once(self) -> bool:
        """Take or renew; whether it is ours."""
        asked_at = self._clock()
        was_held = self.held
        try:
            async with asyncio.timeout(min(GIVE_UP_SECONDS, TRY_SECONDS)):
                ours = await self._lock.take()
        except (KubeError, TimeoutError) as error:
            _LOG.warning("Lease %s: %s", self._name, str(error) or "too slow")
            return self.held
        if not ours:
            self._valid_until = float("-inf")
            if was_held:
                _LOG.error("Lease %s was taken by another", self._name)
            return False
        lapsed = not self.held  # before we asked, or while we waited for the answer
        if lapsed:
            self._term += 1
        # Counted from before the request: a successor counts from when it saw the renewal.
        self._valid_until = asked_at + GIVE_UP_SECONDS
        if lapsed:
            _LOG.info("Lease %s held as %s", self._name, self._identity)
            self._on_won()
        return True

    async def release(self) -> None:
        """Release the Lease, so that a successor need not wait; best effort."""
        if not self.held:
            return
        self._valid_until = float("-inf")
        try:
            await self._lock.release()
        except KubeError as error:
            _LOG.warning("Lease %s not released: %s", self._name, error)
