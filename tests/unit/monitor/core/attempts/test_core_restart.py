"""A monitor that restarts, and one that loses and regains the Lease."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveState
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.core.cores import Start, commit, fail
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write, write_all


def test_a_restarted_monitor_goes_on_where_the_lost_one_stopped(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    core.saves.register(FIRST, request(20))
    write(tmp_path, FIRST, 20, 0)
    core.saves.register(FIRST, request(15))
    fail(core, 15)
    core.tick()
    again = start(claim=None)
    again.tick()
    for step, state in ((10, "committed"), (15, "aborted"), (20, "registered")):
        assert again.saves.save_status(FIRST, CHECKPOINT, step).state == state
    # All but the free space, which any other process of this machine changes.
    assert replace(again.view(), volume=None) == replace(core.view(), volume=None)
    write(tmp_path, FIRST, 20, 1)
    again.tick()
    assert again.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.COMMITTED


def test_without_the_lease_nothing_changes_and_every_call_is_not_ready(
    start: Start, tmp_path: Path
) -> None:
    lease = SimpleNamespace(held=True, term=1)

    def gate() -> None:
        if not lease.held:
            raise errors.NotReadyError("no Lease")

    core = start(authority=Authority(gate=gate, term=lambda: lease.term))
    commit(core, tmp_path, 5)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    lease.held = False
    core.tick()
    with pytest.raises(errors.NotReadyError):
        core.saves.save_status(FIRST, CHECKPOINT, 10)
    with pytest.raises(errors.NotReadyError):
        core.claim(SECOND, "main", None)
    assert not core.ready
    assert RunDirectory(tmp_path).steps() == [5]

    # Meanwhile another monitor held the Lease, committed and removed.
    other = start(claim=None, max_to_keep=1)
    other.tick()
    commit(other, tmp_path, 11)
    lease.held, lease.term = True, 2
    core.tick()
    assert core.ready
    assert core.saves.save_status(FIRST, CHECKPOINT, 11).state is SaveState.COMMITTED
    assert core.view().checkpoint == other.view().checkpoint
    assert core.view().checkpoint.retained == [11]


@pytest.mark.parametrize("phase", ["promoting", "promoted"])
def test_a_lease_lost_amid_a_commit_stops_it_and_it_goes_on_later(
    start: Start, tmp_path: Path, phase: str
) -> None:
    lease = SimpleNamespace(held=True, term=1)

    def gate() -> None:
        if not lease.held:
            raise errors.NotReadyError("no Lease")

    def lose(at: str) -> None:
        if at == phase and lease.term == 1:
            lease.held = False

    failpoints.enable(failpoints.COMMIT, lose)
    core = start(authority=Authority(gate=gate, term=lambda: lease.term))
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    moved = list((tmp_path / "global_step_10").rglob("*.pt"))
    assert len(moved) == {"promoting": 0, "promoted": 2}[phase]
    assert not RunDirectory(tmp_path).manifest(CHECKPOINT, 10).exists()
    lease.held, lease.term = True, 2
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.COMMITTED
