"""Ranks that load fetch from one another's memory what lies in that of another pod.

The step is the one that the monitor named, the same for all ranks, and a file counts only with the
digest that the step's manifest has. So it does not matter which process sent a file, or how old the
copy is.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Final

from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.memory.neighbour import wire
from trainsync.checkpoint.memory.neighbour.serving import MemoryServer, places_of, whole_files
from trainsync.checkpoint.memory.neighbour.wire import NeighbourError
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.shared import Shared, open_shared
from trainsync.dist.agreement import Agreement
from trainsync.failpoints import failpoint
from trainsync.storage import digest
from trainsync.storage.errors import StorageError
from trainsync.storage.saves.receipts import FileEntry, Participant

logger = logging.getLogger(__name__)

_THREADS: Final = 4
_MOST_TRIED: Final = 2  # ranks for one file


@dataclass(frozen=True)
class Holder:
    """Files of the step in the memory of a rank's pod.

    Attributes:
        address: of the rank's server.
        files: that have the name of a whole one there, by their numbers in the step's manifest.
        lacks: whether the rank lacks a file.
        pod: whose memory it is; None: it is not known.
    """

    address: tuple[str, int] | None
    files: frozenset[int]
    lacks: bool
    pod: str | None = None

    def to_json(self) -> str:
        """For the other ranks."""
        return json.dumps([self.address, sorted(self.files), self.lacks, self.pod])

    @classmethod
    def parse(cls, text: str) -> "Holder":
        """Inverse of `to_json`."""
        address, files, lacks, pod = json.loads(text)
        where = None if address is None else (address[0], address[1])
        return cls(where, frozenset(files), lacks, pod)


def choose(holders: Sequence[Holder], file: int, rank: int) -> list[tuple[str, int]]:
    """Where a rank asks for a file, in turn; ranks that ask for much ask different ones. Pure.

    Not in its own pod: it has looked there, and what has the file's name has other bytes.
    """
    own = holders[rank].pod
    having = [
        holder.address
        for holder in holders
        if file in holder.files
        and holder.address is not None
        and (own is None or holder.pod != own)
    ]
    first = rank % len(having) if having else 0
    return having[first:] + having[:first]


def bring(
    resume: Resume,
    own: Callable[[], Iterable[str]],
    sources: Sources,
    ranks: Agreement,
    seconds: float,
) -> None:
    """Bring what this rank lacks from other ranks' memory into its own; all ranks call it alike.

    A file that no rank gives whole is loaded from the volume, or the store.

    Args:
        own: the paths of the files that this rank needs, relative to the step's directory.
        seconds: that fetching may take; the rest is loaded from there, too.

    Raises:
        What ``own`` raises. PeerError, PeerLostError: see `Agreement.do`.
    """
    with ExitStack() as stack:
        fetch = _Fetch(resume, sources, ranks.rank)
        answers = ranks.do("looking into memory", lambda: fetch.look(own, stack).to_json())
        holders = [Holder.parse(answer) for answer in answers]
        # All ranks see the same answers, and so come to the same end.
        if any(one.lacks for one in holders) and any(one.files for one in holders):
            doing = "fetching from the memory of other ranks"
            ranks.do(doing, lambda: fetch.fetch(holders, seconds))


def _pod(place: MemoryPlace) -> str | None:
    """Tells the memory of this pod from that of others; None: nothing lies in it.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        about = place.directory.stat()
    except FileNotFoundError:
        return None
    return f"{socket.gethostname()}/{about.st_dev}/{about.st_ino}"


class _Fetch:
    """One rank's part."""

    def __init__(self, resume: Resume, sources: Sources, rank: int) -> None:
        self._resume = resume
        self._sources = sources
        self._rank = rank
        self._missing: list[str] = []
        self._key = b""
        self._shared: Shared | None = None  # of a rank that has looked

    def look(self, own: Callable[[], Iterable[str]], stack: ExitStack) -> Holder:
        """Find the files in this pod's memory, and whether this rank lacks one.

        Args:
            stack: serves until its end what lies there.
        """
        paths = sorted(set(own()))
        place = self._resume.memory
        if place is None or place.shared is None:
            return Holder(None, frozenset(), lacks=False)
        try:
            return self._look(paths, place, place.shared, stack)
        except (OSError, StorageError, RuntimeError) as error:  # RuntimeError: no thread
            logger.warning("the memory of other ranks is not used: %s", error)
            return Holder(None, frozenset(), lacks=False)

    def _look(
        self, paths: list[str], place: MemoryPlace, shared: str | Path, stack: ExitStack
    ) -> Holder:
        self._shared = open_shared(shared)
        self._key = self._shared.key()
        self._sources.find(paths)
        self._missing = [path for path in paths if not self._sources.in_memory(path)]
        whole = whole_files(places_of(place))
        files = frozenset(
            number
            for number, entry in enumerate(self._resume.manifest.files)
            if entry.digest in whole
        )
        address = None
        if files:
            server = MemoryServer(self._key, places_of(place))
            stack.callback(server.close)
            address = server.address
        return Holder(address, files, bool(self._missing), _pod(place))

    def fetch(self, holders: Sequence[Holder], seconds: float) -> str:
        """Fetch what is missing, some files at once, as far as it comes in time."""
        until = time.monotonic() + seconds
        place = self._resume.memory
        if not self._missing or place is None or self._shared is None:
            return ""
        manifest = self._resume.manifest
        numbers = {entry.path: number for number, entry in enumerate(manifest.files)}
        # In the names of the attempt that saved the step: they are the files that it kept.
        shards = KeptShards(
            place,
            self._shared,
            manifest.attempt,
            manifest.incarnation,
            needed=self._resume.step,
        )

        def fetch_one(path: str) -> bool:
            entry = self._resume.entry(path)
            addresses = choose(holders, numbers[path], self._rank)
            for address in addresses[:_MOST_TRIED]:
                if time.monotonic() > until:
                    break
                try:
                    self._get(shards, entry, address, until)
                    return True
                except NeighbourError as error:
                    logger.warning("%s is not fetched from %s:%d: %s", path, *address, error)
            return False

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="trainsync-fetch") as pool:
            came = list(pool.map(fetch_one, self._missing))
        self._sources.find_again(self._missing, compress(self._missing, came))
        return ""

    def _get(
        self, shards: KeptShards, entry: FileEntry, address: tuple[str, int], until: float
    ) -> None:
        """Raises `NeighbourError`: it did not come whole, or there is no room for it."""
        with wire.connect(address) as connection:
            welcome = wire.ask(connection, self._key, {"want": "get", "digest": entry.digest})
            if welcome.get("bytes") != entry.bytes:
                raise NeighbourError(f"it has {welcome.get('bytes')} bytes, not {entry.bytes}")
            file = shards.begin(self._resume.step, Participant("fetched", self._rank), entry.bytes)
            if file is None:
                raise NeighbourError("there is no room for it in memory")
            try:
                hasher = digest.new_hasher()

                def take(piece: memoryview) -> None:
                    failpoint("neighbour.fetching")
                    if time.monotonic() > until:
                        raise NeighbourError("it is too slow")
                    hasher.update(piece)
                    file.write(piece)

                wire.receive_file(connection, entry.bytes, take)
                found = digest.format_digest(hasher)
                if found != entry.digest:
                    raise NeighbourError(f"its digest is {found}, expected {entry.digest}")
                if file.whole_bytes != entry.bytes:
                    raise NeighbourError("there is no room for it in memory")
                file.seal(entry.digest)
            finally:
                file.discard()
