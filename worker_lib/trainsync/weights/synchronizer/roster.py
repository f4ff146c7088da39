"""The explorers of a run, and which of them live. No I/O, no clock, no Ray.

A registration is a lease, which every call of the explorer renews. An explorer whose lease runs out
is *lost*: it is not waited for any more, and stays in the list, with the cause, until it comes
back, leaves, or many others were lost after it.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import (
    ExplorerLostError,
    ExplorerReplacedError,
    InconsistentUploadError,
    UnknownExplorerError,
)
from trainsync.weights.versions import Position

RUNNING = "running"  # serves weights, trains
REQUIRE_SYNC = "require_sync"  # waits for weights that it does not have
STOPPED = "stopped"
LOST = "lost"  # given up, with a cause; no explorer reports this of itself
STATUSES = (RUNNING, REQUIRE_SYNC, STOPPED)

_MAX_NAME = 128  # characters, as the wire protocol allows
_MAX_LOST = 64
_MAX_CAUSES = 5  # in one sentence


class LossReason(StrEnum):
    """Why an explorer missed a version; losses are counted by it."""

    SILENT = "silent"
    TRANSFER = "transfer"  # lost while the bytes travelled
    NOT_READY = "not_ready"
    QUARANTINED = "quarantined"  # by a call of the driver
    REFUSED = "refused"  # the weights do not fit its model; it lives


@dataclass(frozen=True)
class Serving:
    """A version that an explorer serves, and whose bytes it verified.

    Attributes:
        taken: bytes that it took for it, by way, where the trainer does not know.
        restarts: `Published.restarts` of the version.
    """

    version: int
    digest: str
    taken: Mapping[TransferKind, int] = field(default_factory=dict, compare=False)
    restarts: int = 0

    @property
    def position(self) -> Position:
        """Its place among all versions of the attempt."""
        return self.restarts, self.version


@dataclass
class Explorer:
    """One explorer.

    Attributes:
        session: random name of the process; another one under the same id replaces it.
        expires: when its lease ends, in seconds of the caller's clock.
        version: that it serves; -1 for none yet.
        cause: why it is lost, or why it refused the version that it was offered last.
        returning: it was lost, refused a version, or was not there when one was broadcast, and has
            not caught up yet, so it is not waited for.
        ready: it is connected to the trainer that broadcasts.
        link: number of that connection, or of the last one; another one has another number.
        sent: the newest version that is known to have been broadcast to it; -1 for none.
        refused: the version that it could not take last, and is not told to take; -1 for none.
        paced: it makes batches when it is told to; see `trainsync.weights.pacing.scheduler`.
        loaded: the newest version that it said it serves, also if that is no more.
    """

    session: str
    expires: float
    version: int = -1
    digest: str | None = None
    status: str = RUNNING
    cause: str | None = None
    returning: bool = False
    ready: bool = False
    link: int = 0
    sent: int = -1
    refused: int = -1
    paced: bool = False
    loaded: Position = (0, -1)

    def lose(self) -> None:
        """What it serves is no more: it has to take a version anew."""
        self.version, self.digest, self.sent = -1, None, -1

    @property
    def takes_part(self) -> bool:
        """Whether others wait for it to serve a new version."""
        return self.status not in (STOPPED, LOST) and not self.returning


@dataclass
class Roster:
    """The explorers by id, and their leases of ``lease_seconds``."""

    lease_seconds: float
    explorers: dict[str, Explorer] = field(default_factory=dict)
    losses: Counter[LossReason] = field(default_factory=Counter)
    links: int = 0  # connections to the trainer so far

    def register(self, name: str, session: str, now: float) -> Explorer:
        """A new process joins under this id, with nothing loaded; an older one is replaced.

        The same process's call that comes twice, on its way from another cluster, changes nothing.

        Raises:
            UnknownExplorerError: the id cannot be reported to the monitor.
        """
        _check_name(name)
        known = self.explorers.get(name)
        if known is not None and known.session == session and known.status != LOST:
            known.expires = now + self.lease_seconds
            return known
        return self._new(name, session, now)

    def _new(self, name: str, session: str, now: float) -> Explorer:
        explorer = self.explorers[name] = Explorer(session, now + self.lease_seconds)
        return explorer

    def rejoin(
        self, name: str, session: str, serving: Serving | None, now: float, *, no_more: bool = False
    ) -> Explorer:
        """A process that was lost, or is not known any more, goes on with what it serves.

        Args:
            no_more: the version that it serves is lost: it serves none that counts.

        Raises:
            ExplorerReplacedError: another process lives under this id.
        """
        known = self.explorers.get(name)
        if known is not None and known.session != session and known.status != LOST:
            raise _replaced(name)
        same = known is not None and known.session == session
        _check_name(name)
        explorer = self._new(name, session, now)
        if serving is not None:
            explorer.loaded = serving.position
            if not no_more:
                explorer.version, explorer.digest = serving.version, serving.digest
        if known is None or not same:
            return explorer
        explorer.returning = known.status == LOST or known.returning
        explorer.refused = known.refused
        if known.status != LOST:  # else it may not have got it, although the trainer believes so
            explorer.sent = known.sent
        if known.loaded > explorer.loaded:  # a late message does not take back what it serves
            explorer.loaded = known.loaded
            explorer.version, explorer.digest = known.version, known.digest
        return explorer

    def restore(self, explorers: Mapping[str, Explorer], now: float) -> None:
        """Take over a list, with fresh leases."""
        for name, explorer in explorers.items():
            explorer.expires = now + self.lease_seconds
            self.explorers[name] = explorer
            self.links = max(self.links, explorer.link)

    def renew_lease(self, name: str, session: str, now: float) -> Explorer:
        """The explorer, whose lease is renewed. Raises what `check` raises."""
        explorer = self.check(name, session)
        explorer.expires = now + self.lease_seconds
        return explorer

    def check(self, name: str, session: str) -> Explorer:
        """The explorer, if this process is the one, and lives.

        Raises:
            UnknownExplorerError, ExplorerLostError, ExplorerReplacedError.
        """
        explorer = self.get(name)
        if explorer.session != session:
            raise _replaced(name)
        if explorer.status == LOST:
            raise ExplorerLostError(f"explorer {name} was given up: {explorer.cause}")
        return explorer

    def get(self, name: str) -> Explorer:
        """The explorer of this id. Raises `UnknownExplorerError`."""
        try:
            return self.explorers[name]
        except KeyError:
            raise UnknownExplorerError(
                f"explorer {name!r} is not registered; registered are {sorted(self.explorers)}"
            ) from None

    def check_served(self, version: int, digest: str) -> None:
        """Check that no live explorer serves other bytes of this version.

        Raises:
            InconsistentUploadError: one does.
        """
        for name, explorer in self.explorers.items():
            other = explorer.version == version and explorer.digest not in (None, digest)
            if other and explorer.status != LOST:
                raise InconsistentUploadError(
                    f"version {version} has digest {digest}, but explorer {name} already serves a "
                    f"version {version} with {explorer.digest}"
                )

    def leave(self, name: str, session: str | None) -> None:
        """An explorer goes. A second call is no error; a replaced process removes no explorer."""
        known = self.explorers.get(name)
        if known is not None and session in (None, known.session):
            del self.explorers[name]

    def give_up(self, name: str, cause: str, loss: LossReason) -> None:
        """Wait for this explorer no longer. Raises `UnknownExplorerError`."""
        explorer = self.get(name)
        if explorer.status != LOST:
            self.losses[loss] += 1
        explorer.status, explorer.cause, explorer.returning = LOST, cause, False
        explorer.ready = False
        lost = [other for other, e in self.explorers.items() if e.status == LOST]
        for other in sorted(lost, key=lambda other: self.explorers[other].expires)[:-_MAX_LOST]:
            del self.explorers[other]

    def expire(self, now: float) -> list[str]:
        """Give up the explorers whose lease has run out; returns their ids."""
        late = [n for n, e in self.explorers.items() if e.status != LOST and e.expires <= now]
        for name in late:
            silent = now - self.explorers[name].expires + self.lease_seconds
            self.give_up(name, f"it was silent for {silent:.1f} s", LossReason.SILENT)
        return late

    def refuse(self, name: str, version: int, cause: str) -> Explorer:
        """Note that an explorer cannot take the version. The same refusal counts once.

        Raises `UnknownExplorerError`.
        """
        explorer = self.get(name)
        self.losses[LossReason.REFUSED] += (explorer.refused, explorer.cause) != (version, cause)
        explorer.refused, explorer.cause = version, cause
        return explorer

    def next_expiry(self) -> float | None:
        """When the first lease ends; None if there is none."""
        return min((e.expires for e in self.explorers.values() if e.status != LOST), default=None)

    def extend(self, seconds: float) -> None:
        """Lengthen every lease: it was the reader of the clock that slept."""
        for explorer in self.explorers.values():
            explorer.expires += seconds

    def note_ready(self, explorer: Explorer, *, ready: bool) -> bool:
        """Note whether an explorer is connected to the trainer; True if that has changed."""
        news = explorer.ready != ready
        if news and ready:
            self.links += 1
            explorer.link = self.links
        explorer.ready = ready
        return news

    def note_sent(self, version: int, names: Set[str]) -> None:
        """A version was broadcast to these. Others that lack it are not waited for any more."""
        for name in names & self.explorers.keys():
            explorer = self.explorers[name]
            explorer.sent, explorer.refused = max(explorer.sent, version), -1
        for name in self.behind(version):
            explorer = self.explorers[name]
            explorer.returning = explorer.sent < version

    def rewind(self, step: int) -> None:
        """Versions after that of ``step`` do not count any more: explorers take one anew.

        An explorer that serves the version of ``step`` goes on; its bytes may be called by another
        digest when they are published once more.
        """
        for explorer in self.explorers.values():
            explorer.sent, explorer.refused = min(explorer.sent, step), -1
            if explorer.version > step:
                explorer.lose()
            elif explorer.version == step:
                explorer.digest = None

    def forget_refusals(self) -> None:
        """A version is published once more: it may be taken now."""
        for explorer in self.explorers.values():
            explorer.refused = -1

    def forget_ready(self) -> None:
        """The trainer listens elsewhere: no explorer is connected to it yet."""
        for explorer in self.explorers.values():
            explorer.ready = False

    def ready(self, version: int) -> list[str]:
        """Explorers that are connected to the trainer and serve an older version, or none."""
        return [n for n, e in self.explorers.items() if e.ready and e.version < version]

    def unready(self, version: int) -> list[str]:
        """Explorers that are behind and not connected to the trainer."""
        return [n for n in self.behind(version) if not self.explorers[n].ready]

    def behind(self, version: int) -> list[str]:
        """Explorers that take part and serve an older version, or none."""
        return [n for n, e in self.explorers.items() if e.takes_part and e.version < version]


def check_status(status: str) -> None:
    """Raise ValueError unless ``status`` is one that a process may report of itself."""
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")


def causes(explorers: Mapping[str, Explorer]) -> str:
    """Why explorers are lost, or refused a version, to end a sentence; empty if none is."""
    known = [f"{name}: {e.cause}" for name, e in sorted(explorers.items()) if e.cause is not None]
    more = f"; and {len(known) - _MAX_CAUSES} more" if len(known) > _MAX_CAUSES else ""
    return "".join(f"; explorer {cause}" for cause in known[:_MAX_CAUSES]) + more


def _check_name(name: object) -> None:
    """The monitor is told of all explorers at once: one bad id would hide the others."""
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not _is_text(name):
        raise UnknownExplorerError(
            f"an explorer's id is a string of 1 to {_MAX_NAME} Unicode characters, got "
            f"{name!r:.{_MAX_NAME}}"
        )


def _is_text(name: str) -> bool:
    """Whether it can be written as UTF-8, which a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _replaced(name: str) -> ExplorerReplacedError:
    return ExplorerReplacedError(
        f"another process registered as explorer {name}; this one must not serve any longer"
    )
