"""A run that is deleted and made again resumes from the volume, and counts attempts from 0."""

import json
import shutil
from pathlib import Path

import pytest
from trainsync.api.protocol import CommitNotice, SaveKind, SaveState
from trainsync.cli.checkpoints.prune.plan import choose
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.monitor.commit.newest import newer
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.inspect.saves import check_all_sizes
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest

from tests.unit.monitor.saves import CHECKPOINT, STATE_DICT, Clock, request, write_all

OLD, NEW = SaveOwner(2, "oldattempt2"), SaveOwner(0, "newattempt0")


class MadeAgain:
    """Attempt 2 of the old run left checkpoint 20 and the state dicts 20, 21 and 25."""

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self.root, self.run, self.clock, self.keep = root, RunDirectory(root), Clock(), keep
        self.core = self.start("uid-one")
        self.core.claim(OLD, "main", 2)
        self.save(OLD, 20, CHECKPOINT)
        for step in (20, 21, 25):
            self.save(OLD, step, STATE_DICT)
        self.core = self.start("uid-two")
        self.core.claim(NEW, "main", 0)
        point = self.core.resume(NEW)
        assert point is not None
        assert point.step == 20

    def start(self, uid: str) -> MonitorCore:
        settings = CoreSettings(run_uid=uid, max_to_keep=self.keep)
        return MonitorCore(self.run, settings, clock=self.clock)

    def save(self, owner: SaveOwner, step: int, kind: SaveKind) -> None:
        self.clock.go(1)
        self.core.saves.register(owner, request(step, kind))
        write_all(self.root, owner, step, kind)
        self.core.tick()
        assert self.core.saves.save_status(owner, kind, step).state is SaveState.COMMITTED

    def owner_of(self, step: int, kind: SaveKind) -> SaveOwner:
        found = manifest.read_manifest(self.run, kind, step).manifest
        manifest.check_manifest(self.run, found, with_digest=True)
        return SaveOwner(found.attempt, found.incarnation)


@pytest.fixture
def again(tmp_path: Path) -> MadeAgain:
    return MadeAgain(tmp_path)


def test_its_state_dict_takes_the_place_of_the_old_runs(again: MadeAgain) -> None:
    again.save(NEW, 21, STATE_DICT)
    assert again.owner_of(21, STATE_DICT) == NEW


def test_its_checkpoint_holds_its_own_weights(again: MadeAgain) -> None:
    again.core.saves.register(NEW, request(25, STATE_DICT))
    again.core.saves.register(NEW, request(25, CHECKPOINT, reuse=True))
    for kind in (STATE_DICT, CHECKPOINT):
        write_all(again.root, NEW, 25, kind)
    again.core.tick()
    assert again.core.saves.save_status(NEW, CHECKPOINT, 25).state is SaveState.COMMITTED
    assert (again.owner_of(25, STATE_DICT), again.owner_of(25, CHECKPOINT)) == (NEW, NEW)


def test_explorers_hear_of_what_it_resumed_from_and_then_of_its_own(again: MadeAgain) -> None:
    def position(notice: CommitNotice | None) -> tuple[int, int]:
        assert notice is not None
        return notice.attempt, notice.step

    first = again.core.newest(NEW, CHECKPOINT)
    assert position(first) == (0, 20)
    again.save(NEW, 21, CHECKPOINT)
    found = again.core.newest(NEW, CHECKPOINT)
    assert position(newer(found, position(first))) == (0, 21)


def test_an_attempt_of_the_old_run_with_its_number_is_not_its_own(tmp_path: Path) -> None:
    again = MadeAgain(tmp_path)
    second = SaveOwner(2, "newattempt2")
    again.core.claim(second, "main", 2)
    again.core.resume(second)
    assert again.core.newest(second, STATE_DICT) is not None
    notice = again.core.newest(second, STATE_DICT)
    assert notice is not None
    assert notice.step == 20  # not the 25, which it will train again


class NeverResumes:
    """Attempt 2 of the old run resumed from 20; the new run comes to attempt 2 and does not ask."""

    def __init__(self, root: Path, *, with_uid: bool = True) -> None:
        self.again = MadeAgain(root)
        self.again.core = self.again.start("uid-one")
        assert self.again.core.resume(OLD) is not None
        if not with_uid:
            record = self.again.run.resume_target
            written = json.loads(record.read_text())
            del written["runUid"]
            record.write_text(json.dumps(written))
        self.again.core = self.again.start("uid-two")
        self.owner = SaveOwner(2, "newattempt2")
        self.again.core.claim(self.owner, "main", 2)


def test_what_the_old_run_resumed_from_is_not_its_own(tmp_path: Path) -> None:
    new = NeverResumes(tmp_path)
    core, owner = new.again.core, new.owner
    assert core.newest(owner, CHECKPOINT) is None
    assert core.saves.save_status(owner, CHECKPOINT, 20).state is SaveState.UNKNOWN
    disk = DiskMonitorClient(tmp_path, attempt=2, incarnation=owner.incarnation, run_uid="uid-two")
    assert disk.save_status(CHECKPOINT, 20).state is SaveState.UNKNOWN


def test_what_an_earlier_release_wrote_without_a_uid_still_counts(tmp_path: Path) -> None:
    new = NeverResumes(tmp_path, with_uid=False)
    notice = new.again.core.newest(new.owner, CHECKPOINT)
    assert notice is not None
    assert notice.step == 20


def test_what_the_old_run_resumed_from_stays_until_the_new_one_has_a_later_one(
    tmp_path: Path,
) -> None:
    old = MadeAgain(tmp_path).start("uid-one")
    assert old.resume(OLD) is not None  # attempt 2
    core = MonitorCore(
        RunDirectory(tmp_path), CoreSettings(run_uid="uid-two", max_to_keep=1), clock=Clock()
    )
    owner = SaveOwner(1, "newattempt1")
    core.claim(owner, "main", 1)
    for step, left in ((15, True), (30, False)):
        core.saves.register(owner, request(step))
        write_all(tmp_path, owner, step)
        core.tick()
        assert RunDirectory(tmp_path).manifest(CHECKPOINT, 20).exists() is left


def test_retention_keeps_what_it_saved(tmp_path: Path) -> None:
    again = MadeAgain(tmp_path, keep=2)
    for step in (30, 35, 40):
        again.save(NEW, step, CHECKPOINT)
    steps = [s for s in again.run.steps() if again.run.manifest(CHECKPOINT, s).exists()]
    assert steps == [35, 40]


@pytest.mark.parametrize("clock", ["goes on", "was set back"])
def test_prune_keeps_what_it_saved(again: MadeAgain, clock: str) -> None:
    if clock == "was set back":
        again.clock.go(-3600)
    for step in (22, 23, 24):
        again.save(NEW, step, CHECKPOINT)
    gone = choose(again.run, check_all_sizes(again.run), 2)
    assert 20 in gone
    assert not {23, 24} & set(gone)


def test_prune_takes_the_last_commits_run_where_nothing_is_staged(again: MadeAgain) -> None:
    for step in (22, 23, 24):
        again.save(NEW, step, CHECKPOINT)
    shutil.rmtree(again.run.staging)
    gone = choose(again.run, check_all_sizes(again.run), 2)
    assert 20 in gone
    assert not {23, 24} & set(gone)
