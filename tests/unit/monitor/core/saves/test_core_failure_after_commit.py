"""A failure that comes for a step which is committed already, by the attempt before."""

from pathlib import Path

import pytest
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveState, SaveStatus
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    request,
    write,
    write_all,
)

FAILED = FailureReport(
    kind=CHECKPOINT, step=1, participant=ParticipantRef(component="model", rank=0), error="boom"
)


class Resumed:
    """A run whose second attempt resumed from the first one's checkpoint 1."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.clock = root, RunDirectory(root), Clock()
        self.core = self.start()
        self.core.claim(FIRST, "main", None)
        self.save(1, FIRST)
        self.core.claim(SECOND, "main", None)
        assert self.core.resume(SECOND) is not None
        self.rank = DiskMonitorClient(root, attempt=SECOND.attempt, incarnation=SECOND.incarnation)

    def start(self) -> MonitorCore:
        self.core = MonitorCore(self.run, CoreSettings(max_to_keep=1), clock=self.clock)
        return self.core

    def save(self, step: int, owner: SaveOwner = SECOND) -> None:
        self.core.saves.register(owner, request(step))
        write_all(self.root, owner, step)
        self.core.tick()

    def fail(self, *, by_disk: bool) -> None:
        if by_disk:
            self.rank.failure(FAILED)
            self.core.tick()
        else:
            self.core.saves.failure(SECOND, FAILED)

    def status(self) -> SaveStatus:
        """The same from the monitor, from the disk, and from the monitor's successor."""
        status = self.core.saves.save_status(SECOND, CHECKPOINT, 1)
        assert self.rank.save_status(CHECKPOINT, 1) == status
        assert self.start().saves.save_status(SECOND, CHECKPOINT, 1) == status
        return status


@pytest.fixture
def resumed(tmp_path: Path) -> Resumed:
    return Resumed(tmp_path)


@pytest.mark.parametrize("by_disk", [False, True])
@pytest.mark.parametrize("half_written", [False, True])
def test_the_step_resumed_from_stays_committed(
    resumed: Resumed, *, by_disk: bool, half_written: bool
) -> None:
    before = resumed.status()
    assert before.state is SaveState.COMMITTED
    if half_written:
        write(resumed.root, SECOND, 1, 1)
    resumed.fail(by_disk=by_disk)
    assert resumed.status() == before
    resumed.core.tick()
    assert resumed.core.view().checkpoint.last_error is None
    assert not resumed.run.save(SECOND.attempt, SECOND.incarnation, CHECKPOINT, 1).files.exists()
    found = manifest.read_manifest(resumed.run, CHECKPOINT, 1)
    manifest.check_manifest(resumed.run, found.manifest, with_digest=True)
    assert (found.manifest.attempt, pointers.read_pointer(resumed.run, CHECKPOINT)) == (0, 1)


@pytest.mark.parametrize("by_disk", [False, True])
def test_it_stays_so_when_retention_has_removed_it(resumed: Resumed, *, by_disk: bool) -> None:
    before = resumed.status()
    resumed.save(2)
    assert resumed.run.steps() == [2]
    resumed.fail(by_disk=by_disk)
    assert resumed.status() == before


def test_one_that_is_damaged_and_saved_again_can_fail(resumed: Resumed) -> None:
    (resumed.run.step(1) / "actor/checkpoint_rank_0.pt").unlink()
    assert resumed.core.saves.register(SECOND, request(1)).state is SaveState.REGISTERED
    resumed.fail(by_disk=False)
    assert resumed.status().state is SaveState.ABORTED


def test_a_state_dict_that_is_trained_again_can_fail(resumed: Resumed) -> None:
    failed = FAILED.model_copy(update={"kind": STATE_DICT})
    resumed.core.saves.failure(SECOND, failed)
    assert resumed.core.saves.save_status(SECOND, STATE_DICT, 1).state is SaveState.ABORTED
