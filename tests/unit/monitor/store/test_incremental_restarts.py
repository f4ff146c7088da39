"""Saves that name objects which an attempt before has put, and what else goes on meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from trainsync import failpoints
from trainsync.checkpoint.save.places import store as places
from trainsync.checkpoint.save.places import unchanged
from trainsync.monitor.store import cleanup
from trainsync.storage.objects import commits, inspecting, keys, removal
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names, references

from tests.unit.monitor.store.incremental_runs import (
    CHECKPOINT,
    PARTS,
    Run,
    owner_of,
    path_of,
    saved,
)

FROZEN = path_of(PARTS[0])


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of any size are kept."""
    for module in (places, unchanged):
        monkeypatch.setattr(module, "LEAST", 1)


@pytest.fixture
def run() -> Run:
    """A run whose attempt 0 has committed step 1; attempt 1 has resumed, and begun step 2."""
    made = Run(keep=1)
    saved(made, set())
    made.restart()
    made.register({PARTS[1]})
    return made


def attempt_of(run: Run, step: int, path: str = FROZEN) -> int | None:
    """The attempt that has put a file of a committed step."""
    key = commits.read_manifest(run.bucket, CHECKPOINT, step).keys[path]
    parsed = names.parse_folder(keys.folder_of(key))
    return None if parsed is None else parsed[0]


def end_save(run: Run) -> None:
    while run.todo:
        run.write(0)
    run.tick()


def test_objects_go_from_attempt_to_attempt_until_no_step_names_them() -> None:
    run = Run(keep=1)
    saved(run, set())
    for _ in range(3):
        run.restart()
        saved(run, {PARTS[1]})
        assert attempt_of(run, run.step) == 0
        assert attempt_of(run, run.step, path_of(PARTS[1])) == run.attempt
        run.sweep()
        run.check()
    shared = commits.read_manifest(run.bucket, CHECKPOINT, run.step).keys[FROZEN]
    run.restart()
    saved(run, set(PARTS))
    assert run.bucket.size(shared) is None
    stored = commits.read_manifest(run.bucket, CHECKPOINT, run.step)
    assert {info.key for info in run.bucket.below(keys.OBJECTS)} == set(stored.keys.values())


def test_a_sweep_waits_for_saves_that_may_name_what_it_would_remove(run: Run) -> None:
    while run.todo:
        run.write(0)  # pins are on step 1
    run.bucket.delete([keys.manifest(CHECKPOINT, 1)])
    assert not cleanup.sweep(run.bucket, run.core._worker.ledger, lambda: None)
    run.tick()
    assert attempt_of(run, 2) == 0
    run.check()
    assert cleanup.sweep(run.bucket, run.core._worker.ledger, lambda: None)
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 2)
    assert {info.key for info in run.bucket.below(keys.OBJECTS)} == set(stored.keys.values())


def test_a_sweep_that_waits_is_done_once_the_save_has_ended(run: Run) -> None:
    run.write(0)
    key = "objects/global_step_9/run-0-aaaaaaaa0-cccccccc/late.pt"  # of a process that was deposed
    run.bucket.create(key, b"late")
    run.sweep()
    assert run.bucket.size(key) is not None
    end_save(run)
    run.sweep()
    assert run.bucket.size(key) is None
    run.check()


def test_a_pin_that_comes_while_orphans_are_looked_for_keeps_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.bucket.delete([keys.manifest(CHECKPOINT, 1)])
    limit = run.bucket.below(keys.OBJECTS)[0].modified.replace(year=2100)
    assert removal.orphans(run.bucket, lambda: limit)
    before = references.named

    def pin_and_name(bucket: object) -> set[str]:
        folder = names.save(1, "aaaaaaaa1", CHECKPOINT, 2)
        run.bucket.create(names.pin(folder, 1, PARTS[0]), b"")
        return before(run.bucket)

    monkeypatch.setattr(references, "named", pin_and_name)
    monkeypatch.setattr(references, "pinned", _without_clock(references.pinned))
    assert removal.orphans(run.bucket, lambda: limit) == []


def test_a_save_that_is_committed_while_orphans_are_looked_for_keeps_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = run.bucket.below(keys.OBJECTS)[0].modified.replace(year=2100)
    manifest = run.bucket.get(keys.manifest(CHECKPOINT, 1)).data
    before = references.named

    def name_and_commit(bucket: ObjectBucket) -> set[str]:
        run.bucket.delete([keys.manifest(CHECKPOINT, 1)])  # by retention, as the pin was put
        found = before(bucket)
        later = manifest.replace(b'"step": 1,', b'"step": 2,')
        run.bucket.create(keys.manifest(CHECKPOINT, 2), later)
        return found

    monkeypatch.setattr(references, "named", name_and_commit)
    assert removal.orphans(run.bucket, lambda: limit) == []
    assert before(run.bucket)  # so step 2 names them


def _without_clock(pinned: Callable[..., set[int]]) -> Callable[..., set[int]]:
    return lambda bucket, since=None: pinned(bucket)


@pytest.mark.parametrize("point", ["removing", "uncommitted", "unnamed"])
def test_the_retention_of_a_deposed_attempt_removes_nothing_that_a_later_one_names(
    point: str,
) -> None:
    run = Run(keep=1)
    saved(run, set())
    run.register({PARTS[1]})
    while run.todo:
        run.write(0)
    busy, happened = run.core, []

    def handler(reached: str) -> None:
        if reached == point and not happened:
            happened.append(reached)
            run.restart()  # resumes from step 2, whose frozen parts are those of step 1
            saved(run, {PARTS[1]})

    run.busy = busy
    with failpoints.enabled(failpoints.LIVE, handler):
        busy.tick()  # commits step 2, and removes step 1
    run.busy = None
    assert happened
    run.tick_deposed()
    run.check()
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [3]
    assert attempt_of(run, 3) == 0


def test_a_prune_amid_the_first_save_of_an_attempt_leaves_what_it_names(run: Run) -> None:
    run.write(0)
    run.bucket.create(keys.manifest(CHECKPOINT, 7), b"{")  # else the newest stays anyway
    found = inspecting.check_all_sizes(run.bucket)
    assert not removal.remove(run.bucket, 1, found)
    run.bucket.delete([keys.manifest(CHECKPOINT, 7)])
    end_save(run)
    run.check()


def test_a_step_that_is_damaged_is_not_set_aside_while_a_save_may_name_its_objects(
    run: Run,
) -> None:
    run.write(0)  # step 2 names an object of step 1
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 1)
    run.bucket.delete([stored.keys[path_of(PARTS[1])]])
    after, run.step = run.step, 0
    todo, run.todo = run.todo, []
    run.register(set(PARTS))  # step 1 once more, in full
    while run.todo:
        run.write(0)
    with pytest.raises(AssertionError, match="a reference failed a save"):
        run.tick()
        run.check_saves()
    assert commits.read_manifest(run.bucket, CHECKPOINT, 1).digest == stored.digest
    run.step, run.todo = after, todo
    end_save(run)
    assert attempt_of(run, 2) == 0


def test_a_pin_on_another_save_of_the_same_number_is_of_no_use(run: Run) -> None:
    folder = names.save(1, owner_of(1).incarnation, CHECKPOINT, 2)
    digest = commits.read_manifest(run.bucket, CHECKPOINT, 1).digest
    assert references.pin(run.bucket, folder, 1, PARTS[0], digest)
    blob = run.bucket.get(keys.manifest(CHECKPOINT, 1))
    run.bucket.replace(keys.manifest(CHECKPOINT, 1), blob.data + b"\n", blob)
    assert not references.pin(run.bucket, folder, 1, PARTS[0], digest)
    assert references.pin(run.bucket, folder, 1, PARTS[0])


def test_a_prune_leaves_what_a_save_names_that_began_and_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(keep=2)
    saved(run, set())
    saved(run, {PARTS[1]})  # step 2 names objects of step 1
    run.core._worker.retention._max_to_keep = 1
    before = run.values[PARTS[0]]
    run.register(set(PARTS))  # step 3 names none
    while run.todo:
        run.write(0)
    run.values[PARTS[0]] = before
    run.register({PARTS[1], PARTS[2]})  # step 4 has the state of step 2 again
    reached, go = threading.Event(), threading.Event()
    pin, pinned, remove = references.pin, references.pinned, references.remove
    read = references._read_all
    writer = threading.Thread(target=run.write, args=(0,))
    removing: list[int] = []

    def late_pin(*args: Any) -> bool:
        reached.set()
        assert go.wait(20)
        return pin(*args)

    def look(bucket: ObjectBucket, since: Any = None) -> set[int]:
        found = pinned(bucket, since)
        if removing[-1] == 2 and not go.is_set():
            go.set()
            writer.join(20)
        return found

    def note(bucket: ObjectBucket, step: int, *args: Any, **named: Any) -> bool:
        removing.append(step)
        return remove(bucket, step, *args, **named)

    def read_late(*args: Any) -> Any:
        if len(removing) > 1:
            return read(*args)
        run.tick()  # commits step 3, and removes step 2 as the pin comes
        found = read(*args)
        end_save(run)
        return found

    monkeypatch.setattr(references, "pin", late_pin)
    monkeypatch.setattr(references, "pinned", look)
    monkeypatch.setattr(references, "remove", note)
    monkeypatch.setattr(references, "_read_all", read_late)
    writer.start()
    assert reached.wait(20)
    assert references.remove(run.bucket, 1)
    assert not writer.is_alive()
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [4]
    assert keys.step_of(commits.read_manifest(run.bucket, CHECKPOINT, 4).keys[FROZEN]) == 1
    run.check()
