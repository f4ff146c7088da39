"""A monitor acts on a run in a store while it holds its Lease and the term, and no longer."""

from typing import Any

import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor import errors
from trainsync.storage.objects.errors import StoreRefusedError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import read_term

from tests.unit.monitor.store.runs import (
    CHECKPOINT,
    FIRST,
    ONE,
    OTHER,
    Lease,
    Served,
    healthy,
    request,
    save,
)


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
