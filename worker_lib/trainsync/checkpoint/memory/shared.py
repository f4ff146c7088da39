"""Records that processes which keep shards share: commits, a key, and where each process is.

It lies where the run's checkpoints do, on their volume or in their store. In a store a process asks
for a listing with each save; with copies for two, and for one more with each file that it copies.
"""

import secrets
from pathlib import Path
from typing import Final, Protocol

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.neighbour import roster
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.checkpoint.memory.neighbour.secret import KEY_BYTES, run_key
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import commits
from trainsync.storage.objects.address import is_url
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import ObjectExistsError, StoreRefusedError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.manifest import committed_steps

_KIND: Final = SaveKind.CHECKPOINT
_LIMITS: Final = Limits(
    connect_seconds=5.0, call_seconds=10.0, retries=2, retry_seconds=10.0, pause_seconds=5.0
)
"""Short, so that copies do not delay a save while the store is away."""


class Shared(Protocol):
    """See the module. All methods raise `OSError` and `StorageError`."""

    def newest(self) -> int | None:
        """The newest committed checkpoint; None: there is none."""
        ...

    def key(self) -> bytes:
        """The run's key, made by the process that first asks for one."""
        ...

    def enter(self, attempt: int, incarnation: str, holder: CopyHolder) -> None:
        """Let the incarnation's other processes know of this one."""
        ...

    def copy_holders(
        self, attempt: int, incarnation: str, known: dict[str, CopyHolder] | None = None
    ) -> list[CopyHolder]:
        """All of the incarnation that have entered, in no order.

        Args:
            known: those of an earlier look, by name, which are not read again; gets the new ones.
        """
        ...


class SharedVolume:
    """See `Shared`: in the run's directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def newest(self) -> int | None:
        """See `Shared`."""
        return max(committed_steps(self._run, _KIND), default=None)

    def key(self) -> bytes:
        """See `Shared`."""
        return run_key(self._run)

    def enter(self, attempt: int, incarnation: str, holder: CopyHolder) -> None:
        """See `Shared`."""
        roster.enter(self._run, attempt, incarnation, holder)

    def copy_holders(
        self, attempt: int, incarnation: str, known: dict[str, CopyHolder] | None = None
    ) -> list[CopyHolder]:
        """See `Shared`."""
        return roster.read(self._run, attempt, incarnation, known)


class SharedStore:
    """See `Shared`: objects below ``run/``. Entries are swept with the incarnation."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket

    def newest(self) -> int | None:
        """See `Shared`; a listing."""
        return max(commits.committed_steps(self._bucket, _KIND), default=None)

    def key(self) -> bytes:
        """See `Shared`. A process that reads it may read the checkpoints themselves."""
        found = self._bucket.find(names.MEMORY_KEY)
        if found is None:
            made = secrets.token_hex(KEY_BYTES).encode()
            try:
                self._bucket.create(names.MEMORY_KEY, made)
                return made
            except ObjectExistsError:  # another process was first
                found = self._bucket.get(names.MEMORY_KEY)
        if len(found.data) != 2 * KEY_BYTES:
            raise StoreRefusedError(
                f"{self._bucket.name}: {names.MEMORY_KEY} holds {len(found.data)} bytes; expected "
                f"a key of {2 * KEY_BYTES}"
            )
        return found.data

    def enter(self, attempt: int, incarnation: str, holder: CopyHolder) -> None:
        """See `Shared`."""
        folder = names.copy_holders(attempt, incarnation)
        self._bucket.create(f"{folder}/{roster.name_of(holder)}", roster.encode(holder))

    def copy_holders(
        self, attempt: int, incarnation: str, known: dict[str, CopyHolder] | None = None
    ) -> list[CopyHolder]:
        """See `Shared`; a listing, and a request for each that is not known."""
        known = {} if known is None else known
        found = []
        for info in self._bucket.objects(names.copy_holders(attempt, incarnation)):
            name = info.key.rpartition("/")[2]
            if name not in known and (blob := self._bucket.find(info.key)) is not None:
                holder = roster.decode(blob.data)
                if holder is not None:
                    known[name] = holder
            if name in known:
                found.append(known[name])
        return found


def open_shared(where: str | Path) -> Shared:
    """Of the run whose checkpoints are in that directory, or in the store of that URL.

    Raises:
        StoreUrlError: a URL, and of no store that can be opened.
    """
    if is_url(where):
        return SharedStore(open_run_store(str(where), _LIMITS))
    return SharedVolume(RunDirectory(Path(where)))
