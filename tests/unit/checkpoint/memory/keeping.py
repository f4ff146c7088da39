"""Helpers for tests of shards in memory: a run, its place in memory, and what lies there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory import reuse
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.memory.place import KeptName, MemoryPlace
from trainsync.checkpoint.memory.shared import SharedVolume
from trainsync.storage import digest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

INCARNATION = "0123456789abcdef"
MODEL = Participant("model", 0)
BUDGET = 64 << 20


def place_in(directory: Path, budget: int = BUDGET) -> MemoryPlace:
    return MemoryPlace.of_run(directory / "shm", budget, "uid", directory / "run")


@dataclass
class Keeping:
    """What one process keeps, of one run, below ``directory``."""

    directory: Path
    attempt: int = 0
    incarnation: str = INCARNATION
    budget: int = BUDGET

    def __post_init__(self) -> None:
        (self.directory / "shm").mkdir(exist_ok=True)
        self.place = place_in(self.directory, self.budget)
        self.run = RunDirectory(self.directory / "run")
        self.shared = SharedVolume(self.run)
        self.shards = KeptShards(self.place, self.shared, self.attempt, self.incarnation)

    def keep(self, step: int, data: bytes, participant: Participant = MODEL) -> None:
        file = self.shards.begin(step, participant, len(data))
        if file is not None:
            file.write(memoryview(data))
            file.seal(digest_of(data))

    def commit(self, step: int) -> None:
        manifest = self.run.root / f"global_step_{step}" / "MANIFEST.checkpoint.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text("{}")

    def names(self) -> list[KeptName]:
        """Of all but spare files."""
        files = (kept for kept in self.place.files() if not kept.is_spare)
        return sorted(files, key=lambda kept: kept.name)

    def spares(self) -> list[KeptName]:
        return [kept for kept in self.place.files() if kept.is_spare]

    def inode(self, step: int) -> int:
        (kept,) = [kept for kept in self.names() if kept.step == step]
        return self.place.path(kept).stat().st_ino

    def sealed(self) -> list[int]:
        return sorted(kept.step for kept in self.names() if kept.digest is not None)


def manifest_of(files: Mapping[str, bytes], *participants: Participant) -> Manifest:
    """Of step 5."""
    return Manifest(
        kind=SaveKind.CHECKPOINT,
        step=5,
        attempt=0,
        incarnation=INCARNATION,
        run_uid="uid",
        created_at=datetime.now(UTC),
        participants=participants,
        files=tuple(FileEntry(path, len(data), digest_of(data)) for path, data in files.items()),
    )


def digest_of(data: bytes) -> str:
    hasher = digest.new_hasher()
    hasher.update(data)
    return digest.format_digest(hasher)


def mapped(path: Path) -> torch.Tensor:
    """Bytes of a whole file, mapped as a load maps them, while no descriptor is open.

    `mmap.mmap` would keep one.
    """
    fd = reuse.open_whole(path)
    try:
        size = os.fstat(fd).st_size
        return torch.from_file(f"/proc/self/fd/{fd}", size=size, dtype=torch.uint8)
    finally:
        os.close(fd)


def bytes_of(view: torch.Tensor) -> bytes:
    return view.numpy().tobytes()
