"""A step that an older attempt committed, registered again through the disk alone."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveState
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, Clock, content, request, write_all

FILE = "actor/checkpoint_rank_0.pt"


class Again:
    """A run whose second attempt, which did not resume, saves the first one's step 1 again."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.clock = root, RunDirectory(root), Clock()
        self.clock.now = datetime.now(UTC)  # by which the rank dates its registration
        self.crash_at = ""
        failpoints.enable(failpoints.COMMIT, self.reached)
        self.core = self.start()
        self.core.claim(FIRST, "main", None)
        self.core.saves.register(FIRST, request(1))
        write_all(root, FIRST, 1)
        self.core.tick()
        self.core.claim(SECOND, "main", None)
        self.rank = DiskMonitorClient(root, attempt=SECOND.attempt, incarnation=SECOND.incarnation)

    def start(self) -> MonitorCore:
        self.core = MonitorCore(self.run, CoreSettings(), clock=self.clock)
        return self.core

    def reached(self, phase: str) -> None:
        if phase == self.crash_at:
            self.crash_at = ""
            raise CrashError

    def assert_committed_by(self, attempt: int) -> None:
        found = manifest.read_manifest(self.run, CHECKPOINT, 1)
        assert found.manifest.attempt == attempt
        manifest.check_manifest(self.run, found.manifest, with_digest=True)
        assert pointers.read_pointer(self.run, CHECKPOINT) == 1
        resumed = self.core.resume(SECOND)
        assert resumed is not None
        assert resumed.manifest_digest == found.digest


@pytest.fixture
def again(tmp_path: Path) -> Again:
    return Again(tmp_path)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("seen_before_the_files", [False, True])
def test_it_is_committed_already_as_for_a_request(
    again: Again, *, restarted: bool, seen_before_the_files: bool
) -> None:
    again.rank.register(request(1))
    if seen_before_the_files:
        again.core.tick()
    write_all(again.root, SECOND, 1)
    if restarted:
        again.start()
    again.core.tick()
    status = again.rank.save_status(CHECKPOINT, 1)
    assert status.state is SaveState.COMMITTED
    assert status.manifest_digest == manifest.read_manifest(again.run, CHECKPOINT, 1).digest
    assert again.core.saves.save_status(SECOND, CHECKPOINT, 1) == status
    again.assert_committed_by(FIRST.attempt)


@pytest.mark.parametrize("phase", ["promoting", "promoted", "manifest"])
def test_the_older_ones_checkpoint_survives_a_monitor_that_is_killed(
    again: Again, phase: str
) -> None:
    again.rank.register(request(1))
    write_all(again.root, SECOND, 1)
    again.crash_at = phase
    again.core.tick()  # nothing is promoted, so no phase comes
    again.start().tick()
    again.assert_committed_by(FIRST.attempt)


def test_a_damaged_one_is_replaced(again: Again) -> None:
    (again.run.step(1) / FILE).unlink()
    again.rank.register(request(1))
    write_all(again.root, SECOND, 1)
    again.core.tick()
    assert again.rank.save_status(CHECKPOINT, 1).state is SaveState.COMMITTED
    again.assert_committed_by(SECOND.attempt)


def test_one_that_was_damaged_when_it_was_registered_and_stands_again_is_not_replaced(
    again: Again,
) -> None:
    (again.run.step(1) / FILE).unlink()
    assert again.core.saves.register(SECOND, request(1)).state is SaveState.REGISTERED
    (again.run.step(1) / FILE).write_bytes(content(FIRST, CHECKPOINT, 1, 0))
    write_all(again.root, SECOND, 1)
    again.core.tick()
    status = again.core.saves.save_status(SECOND, CHECKPOINT, 1)
    assert status.state is SaveState.COMMITTED
    again.assert_committed_by(FIRST.attempt)
