"""The files of a step that a load reads: each from memory where it lies there whole, else from the
run's volume or store."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.deadline import FilesInTime
from trainsync.checkpoint.load.reshard.files import MappedShards, Pair, ShardFiles
from trainsync.checkpoint.load.reshard.shard_files import open_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.stored_shards import StoredShards
from trainsync.checkpoint.load.verify import verify
from trainsync.checkpoint.memory.lookup import Sources


class StepFiles:
    """See `ShardFiles`. A context; tensors that are mapped outlive it.

    Attributes:
        memory: which of the files were found there.

    Args:
        deadline: by `time.monotonic`, after which nothing more is asked for of a store; then
            `LoadTimeoutError` is raised. None: each request has a deadline of its own alone.
    """

    def __init__(self, resume: Resume, deadline: float | None = None) -> None:
        self.memory = Sources(resume)
        self._resume = resume
        self._mapped = MappedShards(self.memory.path)  # what is in memory, or on the volume
        self._stored: StoredShards | None = None
        store = resume.store
        if store is not None and deadline is not None:
            store = FilesInTime.by(store, f"step {resume.step}", deadline)
        if store is not None:
            self._stored = StoredShards(resume, store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.memory.close()
        if self._stored is not None:
            self._stored.forget()

    def find(self, paths: Iterable[str]) -> None:
        """Look for these files in memory, several at once, and prepare to read the others. Raises
        as `StoredShards.find`."""
        paths = set(paths)
        self.memory.find(paths)
        if self._stored is not None:
            self._stored.find(sorted(path for path in paths if not self.memory.in_memory(path)))

    def unchecked(self, paths: Iterable[str]) -> set[str]:
        """Those whose bytes the caller compares with the manifest: they are on the volume. What is
        in memory was compared, and what comes from a store is on its way."""
        if self._stored is not None:
            return set()
        self.memory.find(paths := set(paths))
        return {path for path in paths if not self.memory.in_memory(path)}

    def bytes(self, paths: Iterable[str]) -> LoadedBytes:
        """Where the bytes of these files are read; of a store, what of all files came so far."""
        read = self.memory.bytes(paths)
        return read if self._stored is None else replace(read, volume=self._stored.fetched)

    def is_mapped(self, path: str) -> bool:
        """See `ShardFiles`."""
        return self._of(path).is_mapped(path)

    def open(self, path: str) -> Any:
        """See `ShardFiles`. Raises as `StoredShards.open`."""
        return self._of(path).open(path)

    def glance(self, paths: Iterable[str]) -> dict[str, Any]:
        """As `open`, several files, by path; where one lies in memory, its bytes need not be as the
        manifest says before `find`. See `Sources.glance`.

        Raises:
            CorruptCheckpointError: one cannot be understood; of damage the monitor was told.
            LoadTimeoutError, StoreError: the store was not read.
        """
        found: dict[str, Any] = {}
        stored: list[str] = []
        for path in paths:
            where = self.memory.glance(path)
            there = self.memory.only_glanced([path]) or self.memory.in_memory(path)
            if self._stored is not None and not there:
                stored.append(path)
                continue
            try:
                found[path] = open_shard(where)
            except CorruptCheckpointError:
                if not there:
                    verify(self._resume, path)  # then damage is why, and the monitor is told
                raise
        return found if self._stored is None else found | self._stored.open_all(stored)

    def load(self, path: str, map_location: str | torch.device = "cpu") -> Any:
        """See `ShardFiles`. Raises as `open`."""
        return self._of(path).load(path, map_location)

    def copy(self, pairs: Iterable[Pair]) -> None:
        """See `ShardFiles`. Raises as `open`."""
        stored: list[Pair] = []

        def mapped() -> Iterator[Pair]:
            for pair in pairs:
                if self._of(pair[0]) is self._mapped:
                    yield pair
                else:
                    stored.append(pair)

        self._mapped.copy(mapped())
        if self._stored is not None:
            self._stored.copy(stored)

    def real(self, path: str, value: Any) -> Any:
        """See `ShardFiles`. Raises as `open`."""
        return self._of(path).real(path, value)

    def _of(self, path: str) -> ShardFiles:
        if self._stored is None or self.memory.in_memory(path):
            return self._mapped
        return self._stored
