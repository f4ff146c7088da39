"""The monitor of a newer attempt does not meet that of the older one amid a commit."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveState
from trainsync.monitor import errors
from trainsync.monitor.client import local_fencing
from trainsync.monitor.client.local import LocalMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all

SECONDS = 60.0


class Amid:
    """Holds a monitor at a phase of its first commit until it may go on."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self.there = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, phase: str) -> None:
        if phase == self._phase and not self.there.is_set():
            self.there.set()
            assert self.go_on.wait(SECONDS)


def committing(tmp_path: Path, hook: Callable[[str], None]) -> LocalMonitorClient:
    """The monitor of attempt 0, with a save of two ranks that only has to be committed."""
    failpoints.enable(failpoints.COMMIT, hook)
    older = LocalMonitorClient(
        tmp_path,
        attempt=0,
        incarnation=FIRST.incarnation,
        tick_seconds=0.02,
    )
    older.claim("local")
    older.register(request(10))
    write_all(tmp_path, FIRST, 10)
    return older


def successor(tmp_path: Path) -> LocalMonitorClient:
    return LocalMonitorClient(
        tmp_path, attempt=1, incarnation=SECOND.incarnation, tick_seconds=0.02
    )


@pytest.mark.parametrize("phase", ["promoting", "promoted", "manifest", "pointer", "cleaned"])
def test_a_newer_claim_waits_for_the_commit_that_the_older_monitor_is_at(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_fencing, "STOPPED_SECONDS", SECONDS)
    amid = Amid(phase)
    older = committing(tmp_path, amid)
    assert amid.there.wait(SECONDS)
    newer = successor(tmp_path)
    claiming = threading.Thread(target=newer.claim, args=("local",))
    claiming.start()
    run = RunDirectory(tmp_path)
    _until(lambda: run.attempt_lock(1).exists())  # it is about to look at the older attempt
    assert claiming.is_alive()
    amid.go_on.set()
    claiming.join(SECONDS)
    point = newer.resume()
    assert point is not None
    assert point.step == 10
    check_manifest(run, read_manifest(run, CHECKPOINT, 10).manifest, with_digest=True)
    with pytest.raises(errors.FencedError, match="attempt 1 is claimed"):
        older.register(request(20))
    for client in (older, newer):
        client.close()


def test_a_monitor_that_sleeps_amid_a_commit_is_superseded_and_then_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_fencing, "STOPPED_SECONDS", 0.05)
    amid = Amid("promoting")
    older = committing(tmp_path, amid)
    assert amid.there.wait(SECONDS)
    newer = successor(tmp_path)
    newer.claim("local")
    run = RunDirectory(tmp_path)
    assert read_manifest(run, CHECKPOINT, 10).manifest.attempt == 0  # it was complete
    amid.go_on.set()
    with pytest.raises(errors.FencedError, match="attempt 1 is claimed"):
        older.save_status(CHECKPOINT, 10)
    check_manifest(run, read_manifest(run, CHECKPOINT, 10).manifest, with_digest=True)
    for client in (older, newer):
        client.close()


def test_what_another_monitor_did_to_its_saves_is_learnt_from_the_disk(tmp_path: Path) -> None:
    older = committing(tmp_path, lambda _: None)
    assert older.save_status(CHECKPOINT, 10, wait_seconds=SECONDS).state is SaveState.COMMITTED
    older.register(request(20))
    fence = local_fencing.LocalFence(RunDirectory(tmp_path), 1, SECOND.incarnation)
    with fence.claiming():  # and dies before the claim is written, having committed what follows
        write_all(tmp_path, FIRST, 20)
    with fence.own():
        pass
    assert older.save_status(CHECKPOINT, 20, wait_seconds=SECONDS).state is SaveState.COMMITTED
    assert older.save_status(CHECKPOINT, 10).state is SaveState.COMMITTED
    older.close()


def _until(holds: Callable[[], bool]) -> None:
    ticking = threading.Event()
    for _ in range(int(SECONDS / 0.01)):
        if holds():
            return
        ticking.wait(0.01)
    raise AssertionError("it did not come true in time")
