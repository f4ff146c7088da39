"""No object goes that a manifest names: saves that share objects, in any order of what happens."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync import failpoints
from trainsync.api.protocol import DamageReport
from trainsync.checkpoint.save.places import store as places
from trainsync.checkpoint.save.places import unchanged
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.ledger.saves import AbortReason, SaveKey
from trainsync.storage.errors import DamagedFileError, StorageError
from trainsync.storage.objects import commits, inspecting, keys, removal, repair
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.saves.receipts import Participant

from tests.unit.monitor.store.incremental_runs import (
    CHECKPOINT,
    PARTS,
    Run,
    owner_of,
    path_of,
    saved,
)


class KilledError(Exception):
    """The process ended here."""


POINTS = ("shard", "receipt", "pinned", "term", "intent", "outcome")
REMOVAL = ("removing", "uncommitted", "unnamed", "sweeping")
MEANWHILE: dict[str, Callable[[Run], object]] = {
    "nothing": lambda run: None,
    "take over": Run.take_over,
    "take over and tick": lambda run: (run.take_over(), run.tick()),
    "tick": Run.tick,
    "write": lambda run: run.write(0),
    "write and tick": lambda run: (run.write(0), run.tick()),
    "prune": Run.prune,
    "sweep": Run.sweep,
    "deposed": Run.tick_deposed,
    "go on": Run.go_on,
    "go on, deposed": lambda run: (run.go_on(), run.tick_deposed()),
}


@dataclass(frozen=True)
class Event:
    """A point, and what happens there: another one's work, or a kill."""

    point: str
    what: str


@dataclass(frozen=True)
class Act:
    """What is done next: ``begin`` registers a save, ``write`` writes one part of those that were
    begun, ``save`` begins one and writes all of it, and lets the monitor commit."""

    what: str
    changes: frozenset[Participant]
    event: Event
    number: int


EVENTS = st.builds(
    Event,
    st.sampled_from((*POINTS, *REMOVAL, *REMOVAL)),
    st.sampled_from(("nothing", "nothing", "nothing", "kill", *MEANWHILE)),
)
ACTS = st.builds(
    Act,
    st.sampled_from(
        ("save",) * 6
        + ("begin", "begin", "write", "write", "tick", "prune", "end", "end", "sweep", "deposed")
    ),
    st.frozensets(st.sampled_from(PARTS), max_size=2),
    EVENTS,
    st.integers(0, 5),
)


class Driver:
    """Does what it is told, with an event in it."""

    def __init__(self, keep: int, frozen: int = 0) -> None:
        self.run = Run(keep, frozen)

    def do(self, act: Act) -> None:
        """One act; a process that is killed in it begins anew."""
        if act.what in ("begin", "save"):
            self._monitor(lambda: self.run.register(set(act.changes)), act.event)
        if act.what in ("write", "save"):
            # What was begun before a save stays open, and may be committed after it.
            first = len(self.run.todo) - len(PARTS) if act.what == "save" else act.number
            for _ in range(len(PARTS) if act.what == "save" else 1):
                if self._killed(lambda: self.run.write(first), act.event):
                    self.run.restart()
                    break
        if act.what in ("tick", "save"):
            self._monitor(self.run.core.tick, act.event)
        if act.what == "prune":
            self._killed(self.run.prune, act.event)
        if act.what == "end":
            self.run.restart()
        if act.what == "sweep":
            self._monitor(self.run.sweep, act.event)
        if act.what == "deposed":
            self._killed(self.run.tick_deposed, act.event)

    def _monitor(self, work: Callable[[], object], event: Event) -> None:
        """``work`` of the monitor, after which it lives on, unless it was killed."""
        self.run.busy = self.run.core
        try:
            killed = self._killed(work, event)
        finally:
            self.run.busy = None
        if killed:
            self.run.take_over()

    def _killed(self, work: Callable[[], object], event: Event) -> bool:
        happened = False

        def handler(reached: str) -> None:
            nonlocal happened
            if happened or reached != event.point:
                return
            happened = True
            if event.what == "kill":
                raise KilledError
            with suppress(MonitorError, StorageError):
                MEANWHILE[event.what](self.run)
            if reached == "intent" and event.what.startswith(("take over", "go on")):
                # Else it puts a manifest late, of a step that the other one has committed, and may
                # have removed since: so it is with every save in a store.
                raise KilledError

        with failpoints.enabled(failpoints.LIVE, handler):
            try:
                work()
            except KilledError:
                return True
            except (MonitorError, StorageError):
                return False
        return False


@settings(max_examples=25)
@given(
    keep=st.integers(1, 3),
    frozen=st.sampled_from((0, 2)),
    acts=st.lists(ACTS, min_size=6, max_size=12),
)
def test_whatever_happens_each_committed_step_is_whole_and_is_what_was_saved(
    keep: int, frozen: int, acts: list[Act]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, unchanged):
            patch.setattr(module, "LEAST", 1)
        driver = Driver(keep, frozen)
        for act in acts:
            driver.do(act)
            driver.run.check()


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of any size are kept."""
    for module in (places, unchanged):
        monkeypatch.setattr(module, "LEAST", 1)


@pytest.mark.usefixtures("all_sizes")
def test_a_step_that_a_save_may_name_stays_until_the_save_has_ended() -> None:
    run = Run(keep=1)
    saved(run, set())
    run.register(set())
    run.write(0)
    assert references.pinned(run.bucket) == {1}
    found = inspecting.check_all_sizes(run.bucket)
    assert not references.remove(run.bucket, 1)
    assert not removal.remove(run.bucket, 1, found)
    while run.todo:
        run.write(0)
    run.tick()
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [2]
    assert references.pinned(run.bucket) == set()


@pytest.mark.usefixtures("all_sizes")
def test_a_pin_that_comes_after_the_manifest_went_is_of_no_use() -> None:
    run = Run(keep=1)
    saved(run, set())
    run.register(set())
    run.bucket.delete([keys.manifest(CHECKPOINT, 1)])
    while run.todo:
        run.write(0)
    run.tick()
    assert commits.read_manifest(run.bucket, CHECKPOINT, 2).kept == {}


@pytest.mark.usefixtures("all_sizes")
def test_a_removal_that_meets_a_pin_halfway_leaves_the_objects() -> None:
    run = Run(keep=3)
    saved(run, set())
    run.register(set())
    run.core._tenure.clear()  # as retention does: else the next monitor commits it again
    before = run.bucket.below(keys.OBJECTS)

    def handler(point: str) -> None:
        if point == "uncommitted":
            folder = names.save(0, "aaaaaaaa0", CHECKPOINT, 2)
            assert not references.pin(run.bucket, folder, 1, PARTS[0])

    with failpoints.enabled(failpoints.LIVE, handler):
        assert references.remove(run.bucket, 1)
    assert run.bucket.below(keys.OBJECTS) == before
    run.attempt += 1
    run.take_over()
    assert run.bucket.below(keys.OBJECTS) == [], "the next attempt sweeps them"


@pytest.mark.usefixtures("all_sizes")
def test_an_aborted_save_leaves_what_it_has_in_common_with_older_ones() -> None:
    run = Run(keep=3)
    saved(run, set())
    before = run.bucket.below(keys.OBJECTS)
    run.register({PARTS[1]})
    run.write(0)
    run.write(0)
    run.core._worker.ledger.fail(
        SaveKey(owner_of(0), 2, CHECKPOINT), AbortReason.PARTICIPANT_FAILED, "no room"
    )
    run.tick()
    assert run.bucket.below(keys.OBJECTS) == before
    assert references.pinned(run.bucket) == set()


@pytest.mark.usefixtures("all_sizes")
def test_damage_that_several_steps_share_sets_them_all_aside() -> None:
    run = Run(keep=9)
    saved(run, set())
    saved(run, {PARTS[0]})  # other bytes of the first part from here on
    for _ in range(2):
        saved(run, {PARTS[1]})
    newest = commits.read_manifest(run.bucket, CHECKPOINT, 4)
    key = newest.keys[path_of(PARTS[0])]
    assert keys.step_of(key) == 2
    data = bytearray(run.bucket.get(key).data)
    data[5000] ^= 1
    run.bucket.delete([key])
    run.bucket.create(key, bytes(data))
    report = DamageReport(step=4, manifest_digest=newest.digest, error="differs")
    run.core.damage(owner_of(0), report)
    run.restart()
    point = run.core.resume(owner_of(1))
    assert point is not None
    assert point.step == 1
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [1]


def test_a_save_all_of_whose_objects_are_older_is_set_aside_in_a_folder_of_its_own() -> None:
    run = Run(keep=9)
    saved(run, set())
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 1)
    later = replace(stored.manifest, step=2)
    commits.commit(run.bucket, later, dict(stored.keys))
    assert repair.set_aside(run.bucket, commits.read_manifest(run.bucket, CHECKPOINT, 2))
    (aside,) = (i.key for i in run.bucket.below(keys.step_objects(2)))
    assert aside == "objects/global_step_2/aside/MANIFEST.checkpoint.json.damaged"
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [1]


@pytest.mark.parametrize(
    "key",
    [
        "objects/global_step_2/run-0-aaaaaaaa0-bbbbbbbb/frozen_0.pt",  # of no older step
        "objects/global_step_1/../../other",
        "run/TERM.json",
    ],
)
def test_a_receipt_may_name_objects_of_older_steps_alone(key: str) -> None:
    run = Run(keep=3)
    run.step = 1
    run.register(set())
    folder = names.save(0, "aaaaaaaa0", CHECKPOINT, 2)
    run.write(0)
    (record,) = (i.key for i in run.bucket.below(f"{folder}/receipts"))
    said = json.loads(run.bucket.get(record).data)
    assert "kept" in said
    said["kept"] = {path_of(PARTS[0]): key}
    run.bucket.delete([record])
    run.bucket.create(record, json.dumps(said).encode())
    with pytest.raises(DamagedFileError):
        StoredRecords(run.bucket, 0, "aaaaaaaa0", CHECKPOINT, 2).receipt(PARTS[0])
    del said["kept"]  # as an older release writes it
    run.bucket.delete([record])
    run.bucket.create(record, json.dumps(said).encode())
    found = StoredRecords(run.bucket, 0, "aaaaaaaa0", CHECKPOINT, 2).receipt(PARTS[0])
    assert found is not None
    assert found.kept == {}


def test_no_object_is_removed_while_a_manifest_cannot_be_understood() -> None:
    run = Run(keep=9)
    saved(run, set())
    saved(run, set(PARTS))
    run.bucket.create(keys.manifest(CHECKPOINT, 7), b"{")
    before = run.bucket.below(keys.OBJECTS)
    assert references.remove(run.bucket, 1)
    assert run.bucket.below(keys.OBJECTS) == before
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [2, 7]
