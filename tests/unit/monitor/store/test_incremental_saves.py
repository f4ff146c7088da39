"""No object goes that a manifest names: saves that share objects, in any order of what happens."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from trainsync import failpoints
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest
from trainsync.checkpoint.save.places import store as places
from trainsync.checkpoint.save.places.store import StorePlace
from trainsync.monitor.commit.core import CoreSettings
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.errors import StorageError
from trainsync.storage.objects import commits, inspecting, removal
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.saves.receipts import Participant, Receipt

from tests.unit.storage.objects.memory import memory

CHECKPOINT = SaveKind.CHECKPOINT
PARTS = (Participant("frozen", 0), Participant("model", 0), Participant("frozen", 1))
SIZE = 70_000  # floats: more than a block


class KilledError(Exception):
    """The process ended here."""


def owner_of(attempt: int) -> SaveOwner:
    return SaveOwner(attempt, f"aaaaaaaa{attempt}")


def state(value: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), float(value))}


class Run:
    """A store, a monitor, and the writers of an attempt."""

    def __init__(self, keep: int) -> None:
        self.bucket: Bucket = memory()
        self.keep = keep
        self.attempt = 0
        self.step = 0
        self.values = dict.fromkeys(PARTS, 0)
        self.saved: dict[tuple[int, int], dict[str, int]] = {}  # of attempt and step, by path
        self.todo: list[tuple[int, Participant, int]] = []  # step, part and value
        self.core: StoreCore
        self.place: StorePlace
        self.begin()

    def begin(self) -> None:
        """A monitor and new processes of the attempt."""
        owner = owner_of(self.attempt)
        self.todo.clear()
        self.place = StorePlace(self.bucket, owner.attempt, owner.incarnation, incremental=True)
        self.take_over()

    def take_over(self) -> None:
        """Another monitor of the same attempt; the last one does not know that yet."""
        made = StoreCore(
            self.bucket,
            CoreSettings(max_to_keep=self.keep),
            clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
        )
        made.claim(owner_of(self.attempt), "local", None)
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
        files = self.place.part(CHECKPOINT, step, part)
        entries = files.write_state(path_of(part), state(value), SIZE * 4, None)
        owner = owner_of(self.attempt)
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
        )
        files.write_receipt(receipt)

    def tick(self) -> None:
        self.core.tick()

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
                blob = self.bucket.get(stored.keys[entry.path])
                assert digest_of(blob.data) == entry.digest
                if entry.path in values:
                    assert blob.data.find(bytes(state(values[entry.path])["w"].numpy())) > 0
        for save in self.core._worker.ledger.saves():
            assert save.error is None, "a reference failed a save"


def path_of(part: Participant) -> str:
    return f"{part.component}_{part.rank}.pt"


def digest_of(data: bytes) -> str:
    hasher = new_hasher()
    hasher.update(data)
    return format_digest(hasher)


POINTS = ("shard", "receipt", "pinned", "term", "intent", "outcome")
REMOVAL = ("removing", "uncommitted", "unnamed")
MEANWHILE: dict[str, Callable[[Run], object]] = {
    "take over": Run.take_over,
    "take over and tick": lambda run: (run.take_over(), run.tick()),
    "tick": Run.tick,
    "write": lambda run: run.write(0),
    "write and tick": lambda run: (run.write(0), run.tick()),
    "prune": Run.prune,
}


@st.composite
def events(draw: st.DrawFn) -> tuple[str, str]:
    """A point, and what happens there: another one's work, or a kill."""
    point = draw(st.sampled_from((*POINTS, *REMOVAL)))
    return point, draw(st.sampled_from(("nothing", "kill", *MEANWHILE)))


class IncrementalSaves(RuleBasedStateMachine):
    """Saves, commits, retention, prune, and kills at any point of each."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.run = Run(keep)

    def _do(self, work: Callable[[], object], event: tuple[str, str]) -> bool:
        """``work``, with ``event`` at its point; whether it was killed."""
        point, what = event
        happened = False

        def handler(reached: str) -> None:
            nonlocal happened
            if happened or reached != point or what == "nothing":
                return
            happened = True
            if what == "kill":
                raise KilledError
            try:
                MEANWHILE[what](self.run)
            except (MonitorError, StorageError):
                return

        with failpoints.enabled(failpoints.LIVE, handler):
            try:
                work()
            except KilledError:
                return True
            except (MonitorError, StorageError):
                return False
        return False

    @rule(changes=st.sets(st.sampled_from(PARTS)), event=events())
    def train(self, changes: set[Participant], event: tuple[str, str]) -> None:
        if self._do(lambda: self.run.register(changes), event):
            self.run.take_over()

    @rule(number=st.integers(0, 5), event=events())
    def write(self, number: int, event: tuple[str, str]) -> None:
        if self._do(lambda: self.run.write(number), event):
            self.run.restart()

    @rule(event=events())
    def write_all(self, event: tuple[str, str]) -> None:
        while self.run.todo:
            if self._do(lambda: self.run.write(0), event):
                self.run.restart()

    @rule(event=events())
    def tick(self, event: tuple[str, str]) -> None:
        core = self.run.core
        if self._do(core.tick, event):
            self.run.take_over()

    @rule(event=events())
    def prune(self, event: tuple[str, str]) -> None:
        self._do(self.run.prune, event)

    @rule()
    def restart(self) -> None:
        self.run.restart()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "run"):
            self.run.check()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LEAST", 1)


IncrementalSaves.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestIncrementalSaves = pytest.mark.usefixtures("small")(IncrementalSaves.TestCase)
