"""The Synchronizer's state machine: versions, parts, explorers. No I/O, no clock, no Ray.

A version is the trainer's global step. It is *published* once the parts of all trainer ranks are
there, or, where its bytes travel elsewhere, once it is announced. Only one version is published at
a time; explorers acknowledge what they serve.
"""

from collections import Counter
from collections.abc import Mapping

from trainsync.weights.errors import DigestMismatchError, StaleVersionError
from trainsync.weights.synchronizer.publishing_state import LEASE_SECONDS, PublishingState
from trainsync.weights.synchronizer.roster import (
    REQUIRE_SYNC,
    RUNNING,
    Explorer,
    Loss,
    Serving,
    check_status,
)
from trainsync.weights.synchronizer.sync_counts import SyncClock, SyncCounts
from trainsync.weights.synchronizer.traffic import Traffic, Way
from trainsync.weights.versions import NCCL

__all__ = ["LEASE_SECONDS", "WeightsState"]


class WeightsState(PublishingState):
    """Which versions there are, and who serves which; the arguments are those of the base."""

    def lag(self, explorer: str) -> int:
        """Training steps between the version that was offered last and what the explorer serves.

        One that serves nothing yet (-1) lags behind by one more than the version's number.
        """
        return max(0, self.offered - self.roster.get(explorer).version)

    def register(self, explorer: str, session: str, now: float) -> None:
        """An explorer joins, or comes back as a new process with nothing loaded."""
        self._forgive(self.roster.register(explorer, session, now))

    def rejoin(self, explorer: str, session: str, serving: Serving | None, now: float) -> None:
        """The same process comes back, and goes on with what it serves.

        Raises:
            ExplorerReplacedError: another process lives under this id.
            StaleVersionError: it claims a version that never was.
        """
        if serving is not None:
            self._believe(explorer, serving.version)
            meta = None if self.published is None else self.published.meta
            if meta is not None and serving.version == meta.version:
                serving = serving if serving.digest == meta.digest else None
        known = self.roster.rejoin(explorer, session, serving, now)
        self._forgive(known)
        if self.published is not None and known.version >= self.version:
            known.returning = False
        else:
            known.status = REQUIRE_SYNC
        self._note_duration(now)

    def restore_explorers(self, explorers: Mapping[str, Explorer], now: float) -> None:
        """Take over who was known to the state before this one."""
        for name, explorer in explorers.items():
            self._believe(name, explorer.version)
        self.roster.restore(explorers, now)

    def restore_counts(
        self, counts: SyncCounts, losses: Mapping[Loss, int], traffic: Traffic, now: float
    ) -> None:
        """Take over what had happened to the state before this one. Call it last."""
        behind = self.published is not None and bool(self.roster.behind(self.version))
        self.clock = SyncClock(counts, now if behind else None)
        self.roster.losses = Counter(losses)
        self.traffic = traffic

    def renew(
        self,
        explorer: str,
        session: str,
        now: float,
        serving: Serving | None = None,
        *,
        ready: bool = False,
    ) -> bool:
        """The explorer lives; True if what it is ``serving``, or whether ``ready``, is news.

        An acknowledgement may have died with the state before this one.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError; as `acknowledge` does.
        """
        known = self.roster.speaks(explorer, session, now)
        news = self.roster.note_ready(known, ready=ready)
        if serving is None or serving.version <= known.version:
            return news
        self.acknowledge(explorer, session, serving.version, serving.digest, now, serving.taken)
        return True

    def leave(self, explorer: str, now: float, session: str | None = None) -> None:
        """An explorer goes; saying so twice is no error."""
        self.roster.leave(explorer, session)
        self._note_duration(now)

    def give_up(self, explorer: str, cause: str, now: float, loss: Loss = Loss.QUARANTINED) -> None:
        """Wait for this explorer no longer; it may rejoin. Raises `UnknownExplorerError`."""
        self.roster.give_up(explorer, cause, loss)
        self._note_duration(now)

    def expire(self, now: float) -> list[str]:
        """Give up those that were silent for too long; returns their ids."""
        late = self.roster.expire(now)
        if late:
            self._note_duration(now)
        return late

    def refuse(
        self,
        explorer: str,
        session: str,
        version: int,
        cause: str,
        now: float,
        *,
        retries: bool = False,
    ) -> None:
        """The explorer cannot take ``version``, and goes on with what it serves.

        Nobody waits for it until it serves what is published then, unless it ``retries``.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError.
        """
        self.roster.speaks(explorer, session, now)
        if version == self.version:  # or a newer one is on offer, which it may well take
            known = self.roster.refuse(explorer, version, cause)
            known.returning = known.returning or not retries
            self._note_duration(now)

    def set_explorer_status(self, explorer: str, session: str, status: str, now: float) -> None:
        """What the explorer does now.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, ValueError: for a status
                that is none.
        """
        check_status(status)
        self.roster.speaks(explorer, session, now).status = status
        self._note_duration(now)

    def acknowledge(
        self,
        explorer: str,
        session: str,
        version: int,
        digest: str,
        now: float,
        taken: Mapping[Way, int] | None = None,
    ) -> None:
        """The explorer serves ``version`` from now on.

        An acknowledgement of a version that was replaced meanwhile is true and is taken; one that
        goes back is not.

        Args:
            taken: bytes that it took for it, by way; they count once however often it says so.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError, StaleVersionError,
                DigestMismatchError.
        """
        known = self.roster.speaks(explorer, session, now)
        if version < known.version:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version} after {known.version}"
            )
        self._believe(explorer, version)
        if self.published is not None and version == self.version:
            expected = self.published.meta.digest
            if digest != expected:
                known.status = REQUIRE_SYNC
                raise DigestMismatchError(
                    f"explorer {explorer} has {digest} for version {version}, expected {expected}"
                )
        if version > known.version:
            self.traffic = self.traffic.took(taken or {})
        known.version, known.digest, known.status = version, digest, RUNNING
        if version >= self.version:
            known.returning, known.cause = False, None
        self._note_duration(now)

    def _forgive(self, explorer: Explorer) -> None:
        """Wait for nobody who came after the broadcast: it gets the next version, not this one."""
        pushed = self.published is not None and self.published.meta.method == NCCL
        if pushed and explorer.version < self.version:
            explorer.returning = True

    def _believe(self, explorer: str, version: int) -> None:
        """Take it that ``version`` was published once; never publish an older one from now on."""
        if version <= self.version:
            return
        if not self._rebuilt:
            raise StaleVersionError(
                f"explorer {explorer} acknowledges version {version}, but the newest is "
                f"{self.version}"
            )
        self.floor = max(self.floor, version - 1)
