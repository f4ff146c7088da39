"""What is swept, and by which monitor."""

from typing import Any

import pytest
from trainsync.monitor import errors
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import read_term

from tests.unit.monitor.store.runs import CHECKPOINT, FIRST, ONE, SECOND, Lease, Served, request


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
