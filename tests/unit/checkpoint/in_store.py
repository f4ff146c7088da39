"""A checkpoint's files in a store in memory, which counts what is read of them."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from trainsync.checkpoint.load import resume, stored
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.checkpoint.save.places import opening
from trainsync.runtime import clients
from trainsync.storage import digest
from trainsync.storage.block_digests import SUFFIX, BlockHasher, beside
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.saves.receipts import FileEntry

from tests.unit.storage.objects.memory import manifest_of, memory


def memory_of_every_url(monkeypatch: pytest.MonkeyPatch) -> ObjectBucket:
    """A store in memory that a run's every URL opens from now on."""
    made = memory()
    for module in (opening, stored, resume, clients):
        monkeypatch.setattr(module, "open_run_store", lambda url, limits=None: made)
    stored._open.cache_clear()
    return made


class Counted:
    """obstore's store; notes each range, and how many were asked for at once."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.ranges: list[tuple[str, int, int]] = []
        self.after: Callable[[], object] = lambda: None  # called once, after the next range

    def get(self, key: str, options: Any) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.ranges.append((key, *options["range"]))
        try:
            return self._store.get(key, options=options)
        finally:
            with self._lock:
                self._now -= 1
                after, self.after = self.after, lambda: None
            after()

    @property
    def bytes(self) -> int:
        return sum(end - start for _, start, end in self.of_data)

    @property
    def of_data(self) -> list[tuple[str, int, int]]:
        """The ranges of files that are not digests."""
        return [found for found in self.ranges if not found[0].endswith(SUFFIX)]


def digest_of(data: bytes) -> str:
    hasher = digest.new_hasher()
    hasher.update(data)
    return digest.format_digest(hasher)


def blocks_of(data: bytes, block: int) -> bytes:
    """What lies beside a file of these bytes."""
    hasher = BlockHasher(block)
    hasher.update(memoryview(data))
    found = hasher.finish()
    assert found is not None
    return found.encode()


class InStore:
    """Files in a store, the ``resume`` that speaks of them, and the ``reports`` of damage.

    Args:
        block: of whose blocks there are digests beside a file; None: of none.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        files: dict[str, bytes],
        block: int | None,
        part: int = 1 << 20,
    ) -> None:
        self.store = MemoryStore()
        self.counted = Counted(self.store)
        limits = Limits(part_bytes=part)
        # It has of obstore's methods what reading needs.
        bucket = ObjectBucket(self.store, "s3://b", limits, self.counted)  # type: ignore[arg-type]
        monkeypatch.setattr(stored, "_open", lambda url: bucket)
        if block is not None:
            files = files | {
                beside(path): blocks_of(data, block)
                for path, data in files.items()
                if len(data) > block
            }
        for path, data in files.items():
            self.store.put(path, data)
        entries = [FileEntry(path, len(data), digest_of(data)) for path, data in files.items()]
        self.reports: list[str] = []
        self.resume = Resume(
            5,
            Path("s3://b"),
            replace(manifest_of(5), files=tuple(entries)),
            report=lambda text: not self.reports.append(text),
            store=StoredFiles("s3://b", {path: path for path in files}),
        )

    def flip(self, path: str, at: int) -> None:
        """Change a byte of a file, whose digests stay."""
        data = bytearray(bytes(self.store.get(path).bytes()))
        data[at] ^= 1
        self.store.put(path, bytes(data))
