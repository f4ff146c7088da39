"""The core of a monitor in a pod, whose run saves into a store: its Lease, and what it adds."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trainsync.api.protocol import DamageReport, ProgressReport, SaveKind, SaveState
from trainsync.api.spec import Role, Verify
from trainsync.api.status import ConditionType, RolePods, StopSaveState
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.commit.core import CoreSettings
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.served import ServedStoreCore
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.errors import StoreRefusedError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import read_term

from tests.unit.monitor.store.test_store_core import ONE, Run, request, save
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
FIRST, SECOND = SaveOwner(0, "aaaaaaaa0"), SaveOwner(1, "aaaaaaaa1")
OTHER = SaveOwner(0, "bbbbbbbb0")


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
        self.monotonic = Clock()
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


def test_a_monitor_takes_the_term_with_its_lease_and_before_any_claim() -> None:
    run, lease = Served(), Lease()
    lease.lose()
    core = run.served(lease)
    assert (core.ready, core.tells, read_term(run.bucket)) == (False, False, None)
    with pytest.raises(errors.NotReadyError):
        core.claim(FIRST, "main", 0)
    lease.win()
    core.tick()
    assert (core.ready, core.tells) == (True, True)
    with pytest.raises(errors.FencedError, match="not in force"):
        core.check(FIRST)
    core.claim(FIRST, "main", 0)
    core.check(FIRST)
    assert [claim.incarnation for claim in core.claims()] == [FIRST.incarnation]


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


def test_an_old_monitor_commits_nothing_once_another_has_the_term_until_it_wins_anew() -> None:
    run, lease = Served(), Lease()
    old = run.served(lease)
    old.claim(FIRST, "main", 0)
    old.saves.register(FIRST, request(5, ONE))
    new = run.served()
    run.write(FIRST, 5, ONE)
    old.tick()  # it believes to hold its Lease, as after a pause
    assert run.steps() == []
    assert healthy(old)[:2] == ("False", "StoreFailing")
    with pytest.raises(errors.FencedError, match="another process has taken over"):
        old.saves.save_status(FIRST, CHECKPOINT, 5)
    new.tick()
    assert run.steps() == [5], "the save goes on with the new monitor"
    assert new.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.COMMITTED
    lease.lose()
    lease.win()
    old.tick()
    assert old.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.COMMITTED


def test_a_run_at_the_prefix_of_another_is_refused_until_a_person_removes_the_term() -> None:
    run = Served()
    first = run.served(run_uid="one")
    first.claim(FIRST, "main", 0)
    save(run, first, FIRST, 5)
    first.saves.register(FIRST, request(6, ONE))
    run.write(FIRST, 6, ONE)
    second = run.served(run_uid="two")
    assert (second.ready, second.tells, healthy(second)[:2]) == (
        False,
        True,
        ("False", "StoreFailing"),
    )
    assert "another run (uid one) saves into memory://" in healthy(second)[2]
    assert "delete the object run/TERM.json" in healthy(second)[2]
    with pytest.raises(errors.StorageUnavailableError, match="a prefix of its own"):
        second.claim(FIRST, "main", 0)
    run.monotonic.now += 60
    first.tick()
    assert (first.ready, run.steps()) == (True, [5, 6])
    run.bucket.delete([names.TERM])
    second.tick()
    second.claim(OTHER, "main", 0)
    second.expect(None)
    point = second.resume(OTHER)
    assert point is not None
    assert point.step == 6
    run.monotonic.now += 60
    first.tick()
    assert not first.ready
    assert "another run (uid two) saves into memory://" in healthy(first)[2]


def test_a_monitor_that_lost_its_lease_while_it_took_the_term_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, lease = Served(), Lease()
    new = run.served()
    new.claim(FIRST, "main", 0)
    find = run.bucket.find

    def slow(key: str) -> Any:
        if key == names.TERM:
            lease.lose()
        return find(key)

    monkeypatch.setattr(run.bucket, "find", slow)
    old = run.served(lease)
    monkeypatch.undo()
    run.monotonic.now += 20
    new.tick()
    assert (old.ready, new.ready) == (False, True)


def test_a_late_take_of_an_old_monitor_is_taken_back_by_the_one_that_holds_the_lease() -> None:
    run, lease = Served(), Lease()
    new = run.served()
    new.claim(FIRST, "main", 0)
    late = run.served(lease)  # its put arrives only now, after its Lease has run out
    lease.lose()
    assert late.ready is False
    run.monotonic.now += 11
    new.tick()
    assert not new.ready
    with pytest.raises(errors.FencedError):
        new.check(FIRST)
    run.monotonic.now += 20
    new.tick()
    assert new.ready
    save(run, new, FIRST, 5)
    assert run.steps() == [5]


def test_the_term_is_taken_back_a_few_times_only() -> None:
    run = Served()
    one, other = run.served(), run.served()
    for _ in range(200):  # both believe to hold the Lease, which cannot be
        run.monotonic.now += 400
        one.tick()
        other.tick()
    assert [one.ready, other.ready].count(True) == 1
    term = read_term(run.bucket)
    assert term is not None
    assert term.number < 40


def test_a_monitor_that_was_overtaken_in_its_sweep_removes_nothing_of_later_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, lease, later = Served(), Lease(), Lease()
    later.lose()
    old = run.served(lease)
    old.claim(FIRST, "main", 0)
    new = run.served(later)
    third, below, stalled = SaveOwner(2, "aaaaaaaa2"), run.bucket.below, []

    def slow(folder: str) -> Any:
        if folder == keys.OBJECTS and not stalled:
            stalled.append(1)
            lease.lose()
            later.win()
            new.tick()
            new.claim(third, "main", 2)
            new.saves.register(third, request(10, ONE))
            run.write(third, 10, ONE)
            found = below(folder)
            new.tick()
            return found
        return below(folder)

    monkeypatch.setattr(run.bucket, "below", slow)
    old.claim(SECOND, "main", 1)
    assert run.steps() == [10]
    stored = commits.read_manifest(run.bucket, CHECKPOINT, 10)
    assert inspecting.size_findings(run.bucket, stored) == []


def test_a_monitor_without_its_lease_sweeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run, lease = Served(), Lease()
    core = run.served(lease)
    core.claim(FIRST, "main", 0)
    run.write(FIRST, 5, ONE)
    below = run.bucket.below

    def slow(folder: str) -> Any:
        found = below(folder)
        if folder == names.owner(0, FIRST.incarnation) and read_term(run.bucket) != before:
            lease.lose()
        return found

    before = read_term(run.bucket)
    monkeypatch.setattr(run.bucket, "below", slow)
    with pytest.raises(errors.NotReadyError):
        core.claim(SECOND, "main", 1)
    assert len(run.shards()) == 1


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


def test_a_bucket_that_refuses_is_told_of_and_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, asked = Served(), []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise StoreRefusedError("s3://bucket/run, putting probe/x: access is denied (403)")

    monkeypatch.setattr(run.bucket, "create", refuse)
    core = run.served()
    assert (core.ready, core.tells) == (False, True)
    assert healthy(core)[:2] == ("False", "StoreFailing")
    assert "access is denied" in healthy(core)[2]
    with pytest.raises(errors.StorageUnavailableError, match="access is denied"):
        core.claim(FIRST, "main", 0)
    assert len(asked) == 1, "callers hear of it at once"
    monkeypatch.undo()
    run.monotonic.now += 10
    core.tick()
    assert core.ready
    assert healthy(core)[1] == "NothingCommitted"


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
