"""Reads the objects of a store from fellows first, and gives them on."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

from trainsync.agent.fellows.fetching import FellowFailedError, from_fellow, from_pieces
from trainsync.agent.fellows.holding import Holding, open_for_reading
from trainsync.agent.fellows.memory import HeldMemory, RoomBeside
from trainsync.agent.fellows.order import fellows_until, sources
from trainsync.agent.fellows.registry import KnownFellows
from trainsync.agent.fellows.sharing import FellowServer
from trainsync.agent.metrics import AgentMetrics
from trainsync.failpoints import failpoint
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.receipts import FileEntry
from trainsync.weights.transports.anchors.index import StoredObject

_LOG = logging.getLogger(__name__)
_BLOCK: Final = 8 << 20


class FellowsObjects:
    """See `ReadsObject`. Any thread; each object is one `Holding`.

    Args:
        folder: for objects, in this host's memory; files that an agent before left there are
            removed.
        known: gives the fellows of now.
        stall: seconds without a byte after which the next source is taken.
        room: see there.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        folder: Path,
        known: Callable[[], KnownFellows | None],
        server: FellowServer,
        metrics: AgentMetrics,
        stall: float,
        room: RoomBeside,
    ) -> None:
        self._bucket = bucket
        self._folder = folder
        self._known = known
        self._server = server
        self._metrics = metrics
        self._stall = stall
        self._memory = HeldMemory(room, metrics)
        self._numbers = count()
        self._changing = threading.Lock()
        self._failed: frozenset[str] = frozenset()
        self._held: dict[str, Holding] = {}  # by key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)

    def begin(self, version: int, size: int) -> None:
        """Begin a version, which needs the memory of the one before; each fellow is asked again.

        Args:
            size: bytes of its tensors.
        """
        self._server.hold(None)
        with self._changing:
            self._failed = frozenset()
            self._held = {}
        self._memory.begin(version, size)

    def __call__(self, stored: StoredObject, deadline: float) -> Iterable[bytes]:
        """See `ReadsObject`. Where staging leaves no room in memory, the store is read as
        without fellows."""
        if not self._memory.take(stored.bytes):
            return self._unheld(stored, deadline)
        holding: Holding | None = None
        try:
            entry = FileEntry(stored.key, stored.bytes, stored.digest)
            holding = Holding(self._folder / str(next(self._numbers)), [entry])
            self._server.add(holding)
            self._replace_held(stored.key, holding)
            self._fill(holding, stored, deadline)
            return _blocks(holding.path(0))
        except (OSError, UnsafePathError) as error:
            if self._give_up(stored, holding):
                self._memory.without(f"{stored.key}: {error}")
            return self._unheld(stored, deadline)
        except BaseException:
            self._give_up(stored, holding)  # fellows take another source
            raise

    def make_room(self) -> bool:
        """Give up held objects, for staging; False: none is held."""
        with self._changing:
            held, self._held = self._held, {}
        self._server.hold(None)
        if held:
            self._memory.without("staging needs more memory than the version was taken for")
        return bool(held)

    def close(self) -> None:
        """Remove the objects."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unheld(self, stored: StoredObject, deadline: float) -> Iterable[bytes]:
        self._metrics.fetched("store", stored.bytes)
        return self._bucket.until(deadline).blocks(stored.key, stored.bytes)

    def _give_up(self, stored: StoredObject, holding: Holding | None) -> bool:
        """Whether the object's memory counted until now: not where another read, or another
        version, has taken the place of the object."""
        counted = True
        if holding is not None:
            with self._changing:
                counted = self._held.get(stored.key) is holding
                if counted:
                    del self._held[stored.key]
            self._server.drop(holding)
        if counted:
            self._memory.give_back(stored.bytes)
        return counted

    def _replace_held(self, key: str, holding: Holding) -> None:
        with self._changing:
            before = self._held.get(key)
            self._held[key] = holding
        if before is not None:  # another way to the version leads over the object, too
            self._server.drop(before)
            self._memory.give_back(before.files[0].bytes)

    def _fill(self, holding: Holding, stored: StoredObject, deadline: float) -> None:
        until = fellows_until(deadline, time.monotonic())
        if not self._from_fellows(holding, until):
            blocks = self._bucket.until(deadline).blocks(stored.key, stored.bytes)
            from_pieces(holding, 0, blocks, stored.key, deadline)
            self._metrics.fetched("store", stored.bytes)
        failpoint("fellows.held")

    def _from_fellows(self, holding: Holding, until: float) -> bool:
        known = self._known()
        for fellow in () if known is None else sources(known.me, known.fellows):
            if fellow.name in self._failed:
                continue
            assert known is not None
            try:
                from_fellow(fellow, known.key, holding, 0, self._stall, until)
            except FellowFailedError as error:
                self._metrics.fellow_failed()
                _LOG.warning("an object is taken from elsewhere: %s", error)
                with self._changing:
                    self._failed |= {fellow.name}
                continue
            self._metrics.fetched("fellow", holding.files[0].bytes)
            return True
        return False


def _blocks(path: Path) -> Iterator[bytes]:
    fd = open_for_reading(path, 0)
    try:
        while block := os.read(fd, _BLOCK):
            yield block
    finally:
        os.close(fd)
