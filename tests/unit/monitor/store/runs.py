"""Runs in a store, and their monitors, for tests: clocks and Leases are what a test says."""

from datetime import UTC, datetime
from typing import Any

from trainsync.api.protocol import (
    ParticipantRef,
    SaveKind,
    SaveRequest,
    SaveState,
)
from trainsync.api.status import ConditionType
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.monitor.store.served import ServedStoreCore
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.saves.receipts import FileEntry, Receipt

from tests.unit.storage.objects.memory import memory

CHECKPOINT = SaveKind.CHECKPOINT
ONE = ("model", 0)
TWO = ("model", 1)
FIRST, SECOND = SaveOwner(0, "aaaaaaaa0"), SaveOwner(1, "aaaaaaaa1")
OTHER = SaveOwner(0, "bbbbbbbb0")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A store, a clock, and monitors that are killed and made again."""

    def __init__(self) -> None:
        self.bucket: ObjectBucket = memory()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.monotonic = Clock()

    def monitor(self, attempt: int, **settings: Any) -> tuple[StoreCore, SaveOwner]:
        core = StoreCore(
            self.bucket,
            CoreSettings(**settings),
            clock=lambda: self.now,
            monotonic=self.monotonic,
        )
        owner = SaveOwner(attempt, f"aaaaaaaa{attempt}")
        core.claim(owner, "local", None)
        return core, owner

    def write(
        self,
        owner: SaveOwner,
        step: int,
        part: tuple[str, int],
        data: bytes = b"bytes",
        writer: str = "bbbbbbbb",
        kind: SaveKind = CHECKPOINT,
    ) -> Receipt:
        """A participant's object and receipt."""
        hasher = new_hasher()
        hasher.update(data)
        receipt = Receipt(
            kind=kind,
            step=step,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            component=part[0],
            rank=part[1],
            world_size=2,
            files=(FileEntry(f"actor/{part[0]}_{part[1]}.pt", len(data), format_digest(hasher)),),
            seconds=0.0,
            writer=f"{writer}{part[1]}",
        )
        for key in names.shards(receipt).values():
            self.bucket.create(key, data)
        self.records(owner, step, kind).write_receipt(receipt)
        return receipt

    def records(self, owner: SaveOwner, step: int, kind: SaveKind = CHECKPOINT) -> StoredRecords:
        return StoredRecords(self.bucket, owner.attempt, owner.incarnation, kind, step)

    def steps(self, kind: SaveKind = CHECKPOINT) -> list[int]:
        return commits.committed_steps(self.bucket, kind)

    def shards(self) -> list[str]:
        return [info.key for info in self.bucket.below(keys.OBJECTS)]


def request(step: int, *parts: tuple[str, int], kind: SaveKind = CHECKPOINT) -> SaveRequest:
    refs = [ParticipantRef(component=component, rank=rank) for component, rank in parts]
    return SaveRequest(kind=kind, step=step, participants=refs)


def save(run: Run, core: StoreCore, owner: SaveOwner, step: int) -> None:
    core.saves.register(owner, request(step, ONE))
    run.write(owner, step, ONE)
    core.tick()


def state(core: StoreCore, owner: SaveOwner, step: int) -> SaveState:
    return core.saves.save_status(owner, CHECKPOINT, step).state


class Lease:
    """A Lease that a test gives and takes."""

    def __init__(self) -> None:
        self.held, self.wins = True, 1

    def gate(self) -> None:
        if not self.held:
            raise errors.NotReadyError("the Lease is not held")

    def lose(self) -> None:
        self.held = False

    def win(self) -> None:
        self.held, self.wins = True, self.wins + 1


class Told(NullObserver):
    def __init__(self) -> None:
        self.resumes: list[tuple[int, int]] = []
        self.failures: list[str] = []

    def resumed(self, attempt: int, step: int) -> None:
        self.resumes.append((attempt, step))

    def resume_failed(self, attempt: int, message: str) -> None:
        self.failures.append(message)


class Served(Run):
    """As `Run`, with monitors that have a Lease."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()

    def served(
        self, lease: Lease | None = None, executor: Any = None, **settings: Any
    ) -> ServedStoreCore:
        lease = lease or Lease()
        core = ServedStoreCore(
            self.bucket,
            CoreSettings(**settings),
            clock=lambda: self.now,
            authority=Authority(gate=lease.gate, term=lambda: lease.wins),
            observer=self.told,
            executor=executor,
            monotonic=self.monotonic,
        )
        core.tick()
        return core


def healthy(core: ServedStoreCore) -> tuple[str, str, str]:
    found = next(c for c in core.view().conditions if c.type is ConditionType.CHECKPOINT_HEALTHY)
    return found.status.value, found.reason, found.message
