"""A deposed monitor's put of a manifest that arrives late brings no step back: neither one that
retention has removed since, whose objects are gone, nor one that a roll-back has set aside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainsync.api.spec import ResumeFrom
from trainsync.api.status import RollbackState
from trainsync.failpoints import STORE, enabled
from trainsync.storage.objects import commits, inspecting, keys

from tests.unit.monitor.store.runs import CHECKPOINT, FIRST, ONE, SECOND, Run, Served, request, save


@contextmanager
def before_the_manifest(meanwhile: Callable[[], None]) -> Iterator[None]:
    """Right before a manifest is put for the first time ``meanwhile`` happens."""
    calls = [meanwhile]

    def handler(point: str) -> None:
        if point == "uploaded" and calls:
            calls.pop()()

    with enabled(STORE, handler):
        yield
    assert calls == [], "it has happened"


def test_a_step_that_retention_has_removed_stays_removed() -> None:
    run = Run()
    old, owner = run.monitor(0)
    old.saves.register(owner, request(1, ONE))
    run.write(owner, 1, ONE)

    def meanwhile() -> None:
        new, successor = run.monitor(1, max_to_keep=1)
        assert run.steps() == [1], "what was about to be committed is finished"
        save(run, new, successor, 2)
        new.tick()
        assert run.steps() == [2]

    with before_the_manifest(meanwhile):
        old.tick()
    assert run.steps() == [2]
    assert all("/global_step_2/" in key for key in run.shards())
    new, owner = run.monitor(2)
    point = new.resume(owner)
    assert point is not None
    assert point.step == 2


def test_a_step_that_a_roll_back_has_set_aside_stays_aside_and_is_trained_again() -> None:
    run = Served()
    old = run.served()
    old.claim(FIRST, "main", 0)
    save(run, old, FIRST, 10)
    old.resume_from(ResumeFrom(step=10))
    old.saves.register(FIRST, request(20, ONE))
    run.write(FIRST, 20, ONE)
    made = []

    def meanwhile() -> None:
        new = run.served()
        new.claim(SECOND, "main", 1)
        found = new.view().checkpoint.rollback
        assert found is not None
        assert (found.state, found.set_aside) == (RollbackState.DONE, [20])
        made.append(new)

    with before_the_manifest(meanwhile):
        old.tick()
    (new,) = made
    assert run.steps() == [10]
    point = new.resume(SECOND)
    assert point is not None
    assert point.step == 10
    save(run, new, SECOND, 20)
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 20)
    assert stored.manifest.attempt == 1
    assert inspecting.size_findings(run.bucket, stored) == []


def test_a_mark_of_a_monitor_that_died_holds_up_neither_a_resume_nor_the_save() -> None:
    run = Run()
    core, owner = run.monitor(0)
    save(run, core, owner, 1)
    commits.reserve(run.bucket, CHECKPOINT, 2)
    core, owner = run.monitor(1)
    assert core.view().checkpoint.last_error is None
    point = core.resume(owner)
    assert point is not None
    assert point.step == 1
    save(run, core, owner, 2)
    assert run.steps() == [1, 2]
    assert len(run.bucket.below(keys.MANIFESTS)) == 2
