"""Copies of a saving process: it sends its files to a partner, and takes those of another."""

import logging
import os
import secrets
import socket
import threading
from typing import Final, Protocol

from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import KeptShards, SealedFile
from trainsync.checkpoint.memory.neighbour import roster
from trainsync.checkpoint.memory.neighbour.copying import Copier, CopyStats
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.checkpoint.memory.neighbour.serving import MemoryServer
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.shared import Shared
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)


class Guests(Protocol):
    """Hears of the copies that this process takes. Thread-safe; raises nothing."""

    def taken(self, file: SealedFile) -> None:
        """One is whole in memory."""
        ...

    def ended(self, step: int, committed: bool) -> None:
        """The checkpoint of that step has ended."""
        ...


class Neighbour:
    """Follows what this process keeps. It begins with the first file, in the thread that writes it.

    Where it cannot begin, a line of the log says why, and only the run's storage has a second copy.

    Args:
        guests: where a neighbour's files lie in this pod.
        shared: where the processes find one another.
        attempt, incarnation, rank: of this process.
        parts: hears of the copies that are taken; None: nothing does.
    """

    def __init__(
        self,
        guests: MemoryPlace,
        shared: Shared,
        attempt: int,
        incarnation: str,
        rank: int,
        parts: Guests | None = None,
    ) -> None:
        self._parts = parts
        self._guests = KeptShards(guests, shared, attempt, incarnation)
        self._shared = shared
        self._owner: Final = (attempt, incarnation)
        self._rank = rank
        self._lock = threading.Lock()  # held while it begins, which may wait for the storage
        self._begun = False
        self._closed = False
        self._told = False
        self._known: dict[str, CopyHolder] = {}  # by file: it never changes
        # Set once; other threads find them without waiting.
        self._server: MemoryServer | None = None
        self._copier: Copier | None = None

    @property
    def stats(self) -> CopyStats:
        """Counters of the copies that this process has made."""
        copier = self._copier
        return CopyStats() if copier is None else copier.stats

    @property
    def taken_bytes(self) -> int:
        """Bytes of the copies that this process has taken."""
        server = self._server
        return 0 if server is None else server.taken_bytes

    def begun(self) -> None:
        """See `Follower`."""
        with self._lock:
            if self._begun or self._closed:
                return
            try:
                self._begin()
                self._begun = True
            except (OSError, StorageError, RuntimeError) as error:  # RuntimeError: no thread
                if self._server is not None:
                    self._server.close()
                    self._server = None
                # The next file tries again.
                level = logging.DEBUG if self._told else logging.WARNING
                self._told = True
                logger.log(level, "no shards are copied to or from a neighbour so far: %s", error)
            if self._closed:  # meanwhile
                self.close()

    def sealed(self, file: SealedFile) -> None:
        """See `Follower`."""
        copier = self._copier
        if copier is not None:
            copier.offer(file)

    def ended(self, kind: SaveKind, step: int, committed: bool) -> None:
        """A save has ended: see `KeptShards.ended`."""
        if self._server is not None:
            self._guests.ended(kind, step, committed)
        if self._parts is not None:
            self._parts.ended(step, committed)

    def wait(self, timeout: float) -> bool:
        """Wait until all is copied; False if ``timeout`` seconds were not enough."""
        copier = self._copier
        return copier is None or copier.wait(timeout)

    def close(self) -> None:
        """Copy and take no more. Never waits: `begun` may, and looks again at its end."""
        self._closed = True
        if self._copier is not None:
            self._copier.close()
        if self._server is not None:
            self._server.close()

    def _begin(self) -> None:
        self._guests.hold()
        key = self._shared.key()
        taken = (lambda _: None) if self._parts is None else self._parts.taken
        self._server = MemoryServer(key, [self._guests.place], self._guests, *self._owner, taken)
        address, port = self._server.address
        host = socket.gethostname()
        holder = CopyHolder(
            id=secrets.token_hex(8),
            node=os.environ.get(env.NODE_NAME) or host,
            host=host,
            address=address,
            port=port,
            rank=self._rank,
            domain=os.environ.get(env.FAILURE_DOMAIN, "")[: roster.LONGEST_DOMAIN],
        )
        self._shared.enter(*self._owner, holder)
        self._copier = Copier(key, lambda: self._partners(holder), self._owner)

    def _partners(self, own: CopyHolder) -> list[CopyHolder]:
        return roster.partners(self._shared.copy_holders(*self._owner, self._known), own)
