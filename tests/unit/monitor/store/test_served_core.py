"""The core of a monitor in a pod, whose run saves into a store: what it adds to `StoreCore`."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trainsync.api.protocol import DamageReport, ProgressReport, SaveState
from trainsync.api.spec import Role, Verify
from trainsync.api.status import RolePods, StopSaveState
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.errors import StoreRefusedError
from trainsync.storage.objects.live import names

from tests.unit.monitor.store.runs import (
    CHECKPOINT,
    FIRST,
    ONE,
    SECOND,
    Served,
    healthy,
    request,
    save,
)
from tests.waiting import eventually


def test_claims_follow_the_status_of_the_run() -> None:
    run = Served()
    core = run.served()
    with pytest.raises(errors.NotYetError):
        core.claim(SECOND, "main", 0)
    core.claim(SECOND, "main", 1)
    with pytest.raises(errors.ClaimRefusedError, match="attempt 0 is over"):
        core.claim(FIRST, "main", 1)
    with pytest.raises(errors.ClaimRefusedError):
        core.claim(SaveOwner(1, "cccccccc1"), "main", 1)


def test_a_claim_asks_the_store_as_often_with_many_steps_as_with_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(steps: int) -> int:
        run, calls = Served(), []
        core = run.served()
        core.claim(FIRST, "main", 0)
        for step in range(1, steps + 1):
            save(run, core, FIRST, step)
        run.write(FIRST, 900, ONE)  # left behind
        for name in ("below", "folders", "objects", "delete"):
            real = getattr(run.bucket, name)

            def counted(*args: Any, real: Any = real, **given: Any) -> Any:
                calls.append(1)
                return real(*args, **given)

            monkeypatch.setattr(run.bucket, name, counted)
        core.claim(SECOND, "main", 1)
        assert not [key for key in run.shards() if "00900/" in key]
        return len(calls)

    assert asked(80) <= asked(20) + 16  # records of ended saves are kept for 16


def test_a_claim_after_which_the_store_cannot_be_read_is_followed_by_another_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Served()
    core = run.served()
    core.claim(FIRST, "main", 0)
    save(run, core, FIRST, 5)

    def away(*_: object) -> None:
        raise StoreRefusedError("access is denied")

    monkeypatch.setattr(commits, "committed_steps", away)
    with pytest.raises(errors.StorageUnavailableError, match="access is denied"):
        core.claim(SECOND, "main", 1)
    assert [info.step for _, info in core.committed()] == [5], "what was known stays"
    assert not core.ready
    monkeypatch.undo()
    run.monotonic.now += 10
    core.tick()
    core.claim(SECOND, "main", 1)
    core.expect(5)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 5


def test_a_complete_save_is_committed_before_the_next_attempt_begins() -> None:
    run = Served()
    core = run.served()
    core.claim(FIRST, "main", 0)
    core.saves.register(FIRST, request(5, ONE))
    run.write(FIRST, 5, ONE)  # no hint, and no tick
    core.claim(SECOND, "main", 1)
    assert run.steps() == [5]
    core.expect(None)
    assert core.resume(SECOND) is not None
    assert run.told.resumes == [(1, 5)]


def test_no_rank_resumes_before_the_status_is_known() -> None:
    run = Served()
    core = run.served(has_status=True)
    core.claim(FIRST, "main", 0)
    with pytest.raises(errors.NotReadyError, match="status is not read"):
        core.resume(FIRST)
    core.expect(None)
    assert core.resume(FIRST) is None
    assert run.told.resumes == [], "a start at step 0 is no resume"


def test_a_bucket_that_was_emptied_is_no_start_at_step_0() -> None:
    run = Served()
    core = run.served(has_status=True)
    core.expect(40)
    core.claim(FIRST, "main", 0)
    with pytest.raises(errors.NoValidCheckpointError, match="it was emptied"):
        core.resume(FIRST)
    assert "it was emptied" in run.told.failures[0]
    assert healthy(core)[:2] == ("False", "CheckpointMissing")


def test_an_older_copy_of_the_bucket_is_told_of_until_a_newer_commit() -> None:
    run = Served()
    first = run.served()
    first.claim(FIRST, "main", 0)
    save(run, first, FIRST, 5)
    core = run.served(has_status=True)
    core.expect(40)
    core.claim(SECOND, "main", 1)
    assert core.resume(SECOND) is not None
    assert healthy(core)[:2] == ("False", "CheckpointMissing")
    save(run, core, SECOND, 6)
    assert healthy(core)[:2] == ("True", "Committed")


class Later(ThreadPoolExecutor):
    """Runs what is submitted when the test says so."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: call(*args, **given)))
        return future

    def go(self) -> None:
        for future, call in self.waiting:
            future.set_result(call())
        self.waiting = []


def test_digests_are_read_while_requests_are_answered() -> None:
    run, later = Served(), Later()
    core = run.served(executor=later, verify=Verify.DIGEST)
    core.claim(FIRST, "main", 0)
    core.saves.register(FIRST, request(5, ONE))
    run.write(FIRST, 5, ONE)
    core.tick()
    core.tick()
    assert (core.busy, len(later.waiting), run.steps()) == (True, 1, [])
    assert core.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.REGISTERED
    with pytest.raises(errors.NotReadyError, match="is being read"):
        core.claim(SECOND, "main", 1)
    later.go()
    before = core.revision
    core.poll()
    assert (core.busy, run.steps()) == (False, [5])
    assert core.revision > before


def test_a_doubted_checkpoint_is_read_while_requests_are_answered() -> None:
    run, later = Served(), Later()
    core = run.served(executor=later)
    core.claim(FIRST, "main", 0)
    for step in (5, 6):
        save(run, core, FIRST, step)
    digest = commits.read_manifest(run.bucket, CHECKPOINT, 6).digest
    core.damage(FIRST, DamageReport(step=6, manifest_digest=digest, error="cannot be loaded"))
    shard = next(i.key for i in run.bucket.below(keys.step_objects(6)) if i.key.endswith(".pt"))
    run.bucket.replace(shard, b"BYTES", run.bucket.get(shard))
    core.claim(SECOND, "main", 1)
    core.expect(6)
    for _ in range(2):
        with pytest.raises(errors.VerifyingError):
            core.resume(SECOND)
    assert core.busy
    later.go()
    before = core.revision
    core.poll()
    assert (core.busy, core.revision > before) == (False, True)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 5
    assert run.steps() == [5], "the damaged one is set aside"


def test_the_save_that_a_suspension_asked_for_is_told_of() -> None:
    run = Served()
    core = run.served()
    core.claim(FIRST, "main", 0)
    assert core.stop_save() is None
    core.answer_stop(FIRST, run.now, 5)
    core.saves.register(FIRST, request(5, ONE))
    saving = core.stop_save()
    assert saving is not None
    assert saving.state is StopSaveState.SAVING
    run.write(FIRST, 5, ONE)
    core.tick()
    saved = core.view().checkpoint.stop_save
    assert saved is not None
    assert saved.state is StopSaveState.COMMITTED


def test_progress_and_what_is_at_risk_are_shown() -> None:
    run = Served()
    core = run.served()
    core.gpus = 8.0
    core.claim(FIRST, "main", 0)
    core.report_progress(FIRST, ProgressReport(step=3, total_steps=9))
    run.now += timedelta(seconds=60)
    core.report_progress(FIRST, ProgressReport(step=4, total_steps=9))
    view = core.view()
    assert view.at_risk is not None
    assert (view.at_risk.steps, view.at_risk.gpu_seconds) == (4, 480)
    report = core.last_report()
    assert report is not None
    assert report.step == 4


def test_the_account_goes_on_with_the_next_monitor() -> None:
    run = Served()
    pods = {Role.TRAINER: RolePods(role="Trainer", held=2, held_gpus=16)}
    core = run.served()
    core.gpus = 16.0
    core.see_pods(pods, "Running")
    core.claim(FIRST, "main", 0)
    for _ in range(3):
        run.monotonic.now += 100
        core.see_pods(pods, "Running")
        core.report_progress(FIRST, ProgressReport(step=1, total_steps=9))
    core.tick()
    assert run.bucket.find(names.ACCOUNT) is not None
    core.end()
    shown = core.view().account
    assert shown is not None
    other = run.served()
    after = other.view().account
    assert after is not None
    assert (after.since, [role.role for role in after.roles]) == (
        shown.since,
        [role.role for role in shown.roles],
    )


def test_a_late_write_of_an_old_monitor_does_not_replace_the_account_unseen() -> None:
    run = Served()
    pods = {Role.TRAINER: RolePods(role="Trainer", held=1, held_gpus=1)}
    old, new = run.served(), run.served()
    for core in (new, old):  # the old one believes to hold its Lease
        core.gpus = 1.0
        core.see_pods(pods, "Running")
    new.end()
    written = run.bucket.get(names.ACCOUNT).data
    run.now = datetime(2026, 2, 1, tzinfo=UTC)
    old.end()
    assert run.bucket.get(names.ACCOUNT).data == written


def test_a_thread_reads_what_is_read_in_full() -> None:
    run = Served()
    with ThreadPoolExecutor(1) as pool:
        core = run.served(executor=pool, verify=Verify.DIGEST)
        core.claim(FIRST, "main", 0)
        core.saves.register(FIRST, request(5, ONE))
        run.write(FIRST, 5, ONE)
        core.tick()

        def committed() -> bool:
            core.poll()
            return run.steps() == [5]

        eventually(committed)
