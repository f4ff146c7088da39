"""Minimal participants of saves, in place of the library."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import atomic
from trainsync.storage.digest import file_digest
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import FileEntry

CHECKPOINT = SaveKind.CHECKPOINT
STATE_DICT = SaveKind.STATE_DICT
FIRST = SaveOwner(0, "aaaaaaaa0")
SECOND = SaveOwner(1, "bbbbbbbb1")


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def request(
    step: int, kind: SaveKind = CHECKPOINT, ranks: int = 2, *, reuse: bool = False
) -> SaveRequest:
    who = [ParticipantRef(component="model", rank=rank) for rank in range(ranks)]
    return SaveRequest(kind=kind, step=step, participants=who, reuse_state_dict=reuse)


def content(owner: SaveOwner, kind: SaveKind, step: int, rank: int) -> bytes:
    return f"{owner} {kind} {step} {rank} ".encode() * 50


def directory(
    root: Path, owner: SaveOwner, step: int, kind: SaveKind = CHECKPOINT
) -> SaveDirectory:
    return RunDirectory(root).save(owner.attempt, owner.incarnation, kind, step)


def stage(
    root: Path,
    owner: SaveOwner,
    step: int,
    rank: int,
    kind: SaveKind = CHECKPOINT,
    *,
    path: str | None = None,
    data: bytes | None = None,
) -> FileEntry:
    """Write a participant's file, and return its receipt entry."""
    save = directory(root, owner, step, kind)
    relative = path or f"actor/{kind.value}_rank_{rank}.pt"
    file = save.files / relative
    atomic.make_directory(file.parent)
    file.write_bytes(content(owner, kind, step, rank) if data is None else data)
    return FileEntry(relative, file.stat().st_size, file_digest(file))


def receipt(
    owner: SaveOwner,
    step: int,
    rank: int,
    kind: SaveKind,
    *files: FileEntry,
    component: str = "model",
) -> receipts.Receipt:
    return receipts.Receipt(
        kind=kind,
        step=step,
        attempt=owner.attempt,
        incarnation=owner.incarnation,
        component=component,
        rank=rank,
        world_size=8,
        files=files,
        seconds=0.1,
    )


def write(root: Path, owner: SaveOwner, step: int, rank: int, kind: SaveKind = CHECKPOINT) -> None:
    """A participant's whole save: files, then the receipt."""
    entry = stage(root, owner, step, rank, kind)
    receipts.write_receipt(
        directory(root, owner, step, kind), receipt(owner, step, rank, kind, entry)
    )


def write_all(
    root: Path, owner: SaveOwner, step: int, kind: SaveKind = CHECKPOINT, ranks: int = 2
) -> None:
    for rank in range(ranks):
        write(root, owner, step, rank, kind)
