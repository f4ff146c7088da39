"""A run whose saves share objects: a store, monitors, and writers, all at one's call."""

from datetime import UTC, datetime
from functools import partial

import torch
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.places.store import StorePlace
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects import commits, inspecting, parts, removal
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.saves.receipts import Participant, Receipt

from tests.unit.storage.objects.memory import memory

CHECKPOINT = SaveKind.CHECKPOINT
PARTS = (Participant("frozen", 0), Participant("model", 0), Participant("frozen", 1))
SIZE = 70_000  # floats: more than a block


def owner_of(attempt: int) -> SaveOwner:
    return SaveOwner(attempt, f"aaaaaaaa{attempt}")


def state(value: int, frozen: int = 0) -> dict[str, torch.Tensor]:
    """Of ``value``, after something ``frozen`` times as large that never changes."""
    return {"frozen": torch.ones(frozen * SIZE), "w": torch.full((SIZE,), float(value))}


class Run:
    """A store, a monitor, and the writers of an attempt.

    Args:
        frozen: see `state`; of each part.
    """

    def __init__(self, keep: int, frozen: int = 0) -> None:
        self.frozen = frozen
        self.bucket: ObjectBucket = memory()
        self.keep = keep
        self.attempt = 0
        self.step = 0
        self.values = dict.fromkeys(PARTS, 0)
        self.saved: dict[tuple[int, int], dict[str, int]] = {}  # of attempt and step, by path
        self.todo: list[tuple[int, Participant, int]] = []  # step, part and value
        self.core: StoreCore
        self.deposed: list[StoreCore] = []  # monitors that may be at work, and know nothing
        self.busy: StoreCore | None = None  # the monitor amid whose work an event happens
        self.place: StorePlace
        self.begin()

    def begin(self) -> None:
        """A monitor and new processes of the attempt, which resume."""
        owner = owner_of(self.attempt)
        self.todo.clear()
        self.place = StorePlace(self.bucket, owner.attempt, owner.incarnation, incremental=True)
        self.take_over()
        self.core.resume(owner)

    def take_over(self) -> None:
        """Another monitor of the same attempt; the last one may be at work, and knows nothing."""
        made = StoreCore(
            self.bucket,
            CoreSettings(max_to_keep=self.keep),
            clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        )
        made.claim(owner_of(self.attempt), "local", None)
        if self.step:
            self.deposed.append(self.core)
        self.core = made

    def restart(self) -> None:
        self.attempt += 1
        self.begin()

    def register(self, changes: set[Participant]) -> None:
        """The next step, of which ``changes`` are other states than before."""
        self.step += 1
        for part in changes:
            self.values[part] = self.step + 1000 * self.attempt
        self.saved[self.attempt, self.step] = {
            path_of(part): value for part, value in self.values.items()
        }
        refs = [ParticipantRef(component=part.component, rank=part.rank) for part in PARTS]
        request = SaveRequest(kind=CHECKPOINT, step=self.step, participants=refs)
        self.core.saves.register(owner_of(self.attempt), request)
        self.todo += [(self.step, part, self.values[part]) for part in PARTS]

    def write(self, number: int) -> None:
        """One of the parts that are still to be written."""
        if not self.todo:
            return
        step, part, value = self.todo.pop(number % len(self.todo))
        owner = owner_of(self.attempt)
        files = self.place.part(CHECKPOINT, step, part)
        entries = files.write_state(
            path_of(part), partial(dump, state(value, self.frozen)), SIZE * 4
        )
        receipt = Receipt(
            kind=CHECKPOINT,
            step=step,
            attempt=owner.attempt,
            incarnation=owner.incarnation,
            component=part.component,
            rank=part.rank,
            world_size=2,
            files=tuple(entries),
            seconds=0.0,
            writer=files.writer,
            kept=files.kept,
            based=files.based,
            version=2 if files.based else 1,
        )
        files.write_receipt(receipt)

    def tick(self) -> None:
        if self.core is not self.busy:  # else its thread is the one that waits for this event
            self.core.tick()

    def tick_deposed(self) -> None:
        """Monitors of before do what they think is due, sweeps and retention too."""
        for core in self.deposed:
            if core is not self.busy:
                core._worker.retention._due = True
                core._sweeps._due_at = 0.0
                core.tick()

    def sweep(self) -> None:
        """The monitor's second sweep is due."""
        if self.core is not self.busy:
            self.core._sweeps._due_at = 0.0
            self.core.tick()

    def go_on(self) -> None:
        """Another attempt begins, and saves a step."""
        self.restart()
        saved(self, {PARTS[1]})

    def prune(self) -> None:
        found = inspecting.check_all_sizes(self.bucket)
        for step in removal.choose(self.bucket, found, self.keep):
            removal.remove(self.bucket, step, found)

    def check(self) -> None:
        """Every step that is committed is whole, and is what was saved."""
        for step in commits.committed_steps(self.bucket, CHECKPOINT):
            stored = commits.read_manifest(self.bucket, CHECKPOINT, step)
            values = self.saved[stored.manifest.attempt, step]
            for entry in stored.manifest.files:
                key, base = stored.keys[entry.path], stored.bases.get(entry.path)
                data = b"".join(parts.read_blocks(self.bucket, key, entry.bytes, base))
                assert digest_of(data) == entry.digest
                if entry.path in values:
                    assert data.find(bytes(state(values[entry.path])["w"].numpy())) > 0
        self.check_saves()

    def check_saves(self) -> None:
        """No save of the attempt has failed."""
        for save in self.core._worker.ledger.saves():
            assert save.error is None, "a reference failed a save"


def path_of(part: Participant) -> str:
    return f"{part.component}_{part.rank}.pt"


def digest_of(data: bytes) -> str:
    hasher = new_hasher()
    hasher.update(data)
    return format_digest(hasher)


def saved(run: Run, changes: set[Participant]) -> None:
    run.register(changes)
    while run.todo:
        run.write(0)
    run.tick()
