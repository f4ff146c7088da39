"""Which inference servers report, and with which weights."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from trainsync.api.protocol import ASLEEP, ServerReport
from trainsync.api.spec import SyncMethod
from trainsync.api.status import ProofVerdict, ServerWeights
from trainsync.monitor.errors import TooManyWaitersError

FORGET_SECONDS: Final = 60.0
"""A server without a report for so long is gone: its pod was replaced."""
SILENT_SECONDS: Final = 20.0
"""Clients are not told of a server without a report for so long: agents report each 5 s."""
MOST_SERVERS: Final = 1024
MOST_SHOWN: Final = 256
_MOST_REQUESTS: Final = 4  # of one server: those whose client gave up end by themselves


@dataclass(frozen=True)
class ServersView:
    """Servers at one moment.

    Attributes:
        newest: step of the newest version; -1 before the first.
        shown: by name; of many, ready ones with little lag are left out first.
        states: how many there are in each of `SERVER_STATES`, with those left out.
        refutations: counted since this process began.
        method: by which versions travel.
    """

    newest: int
    shown: tuple[ServerWeights, ...]
    states: dict[str, int]
    refutations: int
    method: SyncMethod = SyncMethod.CHECKPOINT


SERVER_STATES: Final = ("ready", "not_ready", "refuted")


def state_of(server: ServerWeights) -> str:
    """One of `SERVER_STATES`: a refuted server is not ready."""
    if server.verdict is ProofVerdict.REFUTED:
        return "refuted"
    return "ready" if server.ready else "not_ready"


@dataclass
class _ServerEntry:
    status: ServerWeights
    dated: bool
    """Whether the version's age is known."""
    heard: float
    requests: int = 0


class ServerRoster:
    """The reports of the run's servers. Methods may be called from any thread.

    Args:
        clock: seconds that only ever go on.
        method: by which the run's versions travel.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        method: SyncMethod = SyncMethod.CHECKPOINT,
    ) -> None:
        self._clock = clock
        self._method = method
        self._lock = threading.Lock()
        self._servers: dict[str, _ServerEntry] = {}
        self._newest: int | None = None
        self._refutations = 0
        self._used = False

    def begin(self, servers: Iterable[ServerWeights], newest: int) -> None:
        """Begin with the servers of the status that the monitor before left, until they report.

        Args:
            newest: step of the newest version, until `tell_newest`.
        """
        with self._lock:
            for server in servers:
                self._used = True
                self._newest = newest if self._newest is None else self._newest
                known = server.version >= 0
                self._servers.setdefault(server.name, _ServerEntry(server, known, self._clock()))

    def tell_newest(self, step: int) -> None:
        """The newest version is of ``step``; -1: there is none."""
        self._newest = step

    def tell_none_yet(self) -> None:
        """No version is known of, unless the roster knows one: servers that report are seen."""
        self._newest = -1 if self._newest is None else self._newest

    @contextmanager
    def reporting(self, pod: str, report: ServerReport) -> Iterator[None]:
        """Take a report of a pod's server, whose request lasts as long as the block.

        Raises:
            TooManyWaitersError: there are too many servers, or requests of this one.
        """
        entry = self._take(pod, report)
        try:
            yield
        finally:
            with self._lock:
                entry.requests -= 1
                entry.heard = self._clock()

    @property
    def empty(self) -> bool:
        """Whether no server reports."""
        return not self._servers

    def reporting_now(self) -> list[ServerWeights]:
        """Servers for clients, by name; none while the newest version is not known yet."""
        with self._lock:
            newest, oldest = self._newest, self._clock() - SILENT_SECONDS
            entries = [e for e in self._servers.values() if e.requests or e.heard >= oldest]
        found = [] if newest is None else [_with_lag(entry, newest) for entry in entries]
        return sorted(found, key=lambda server: server.name)

    def view(self) -> ServersView | None:
        """None where no server has ever reported, or the newest version is not known yet."""
        with self._lock:
            self._forget()
            newest, refutations = self._newest, self._refutations
            if not self._used or newest is None:
                return None
            servers = [_with_lag(entry, newest) for entry in self._servers.values()]
        states = dict.fromkeys(SERVER_STATES, 0)
        for server in servers:
            states[state_of(server)] += 1
        worst = sorted(servers, key=lambda s: (-SERVER_STATES.index(state_of(s)), -s.lag, s.name))
        shown = sorted(worst[:MOST_SHOWN], key=lambda s: s.name)
        return ServersView(newest, tuple(shown), states, refutations, self._method)

    def _take(self, pod: str, report: ServerReport) -> _ServerEntry:
        with self._lock:
            self._forget()
            entry = self._servers.get(pod)
            if entry is None and len(self._servers) >= MOST_SERVERS:
                raise TooManyWaitersError(f"{MOST_SERVERS} inference servers report already")
            if entry is not None and entry.requests >= _MOST_REQUESTS:
                raise TooManyWaitersError(f"{_MOST_REQUESTS} requests of {pod} wait already")
            status = _status(pod, report)
            self._used = True
            before = 0 if entry is None else entry.status.refutations
            # A new agent counts anew.
            self._refutations += max(report.refutations - before, 0)
            dated = report.lag is not None
            if entry is None:
                entry = self._servers[pod] = _ServerEntry(status, dated, 0.0)
            entry.status, entry.dated, entry.heard = status, dated, self._clock()
            entry.requests += 1
            return entry

    def _forget(self) -> None:
        oldest = self._clock() - FORGET_SECONDS
        gone = [n for n, e in self._servers.items() if not e.requests and e.heard < oldest]
        for name in gone:
            del self._servers[name]


def _status(pod: str, report: ServerReport) -> ServerWeights:
    return ServerWeights(
        name=pod,
        servers=report.servers,
        endpoint=report.endpoint,
        agent=report.agent,
        version=-1 if report.version is None else report.version,
        tag=report.tag,
        lag=0,
        ready=report.ready,
        verdict=report.verdict,
        proven=report.proven,
        refutations=report.refutations,
        message=report.message,
    )


def _with_lag(entry: _ServerEntry, newest: int) -> ServerWeights:
    if entry.status.tag == ASLEEP:
        return entry.status
    version = entry.status.version if entry.dated else -1
    return entry.status.model_copy(update={"lag": max(newest - version, 0)})
