"""What a monitor that was killed amid a write leaves is swept by the next one, and nothing else."""

from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor import errors
from trainsync.monitor.commit.committer import Authority
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import superseding

from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    request,
    write_all,
)


def half_written(path: Path) -> Path:
    """As a kill between the write of a file and its rename leaves it."""
    temporary = atomic.temporary_name(path)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text("{")
    return temporary


def start(root: Path, uid: str = "local") -> MonitorCore:
    core = MonitorCore(RunDirectory(root), CoreSettings(run_uid=uid), clock=Clock())
    core.tick()
    return core


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Step 10 is committed, and step 20 complete when the monitor was killed."""
    core = start(tmp_path)
    core.claim(FIRST, "main", None)
    for step in (10, 20):
        core.saves.register(FIRST, request(step))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    write_all(tmp_path, FIRST, 20)
    return RunDirectory(tmp_path)


def test_every_temporary_of_a_killed_monitor_goes(run: RunDirectory) -> None:
    left = [
        half_written(path)
        for path in (
            run.pointer(CHECKPOINT),
            run.resume_target,
            run.claims / "local-1-main.json",
            run.manifest(CHECKPOINT, 20),
        )
    ]
    core = start(run.root)
    assert [path for path in left if path.exists()] == []
    assert core.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.COMMITTED


def test_so_do_those_of_a_run_that_had_the_name_before(run: RunDirectory) -> None:
    left = half_written(run.manifest(CHECKPOINT, 20))
    core = start(run.root, "made-again")
    core.claim(SaveOwner(0, "newattempt0"), "main", 0)
    assert not left.exists()


def test_that_of_a_state_dict_put_together_aside_does_not_come_into_its_step(
    run: RunDirectory,
) -> None:
    core = start(run.root)
    core.saves.register(FIRST, request(30, STATE_DICT))
    write_all(run.root, FIRST, 30, STATE_DICT)
    core.tick()
    core.claim(SECOND, "main", None)
    core.saves.register(SECOND, request(30, STATE_DICT))
    write_all(run.root, SECOND, 30, STATE_DICT)
    place = superseding.aside(run, directory(run.root, SECOND, 30, STATE_DICT))
    half_written(place / run.manifest(STATE_DICT, 30).name)
    start(run.root)
    assert {path.name for path in run.step(30).iterdir()} == {"MANIFEST.state_dict.json", "actor"}


def test_what_others_may_be_writing_stays(run: RunDirectory) -> None:
    theirs = [
        half_written(path)
        for path in (
            run.step(20) / "actor/shard.pt",
            run.step(20) / "data.pt",
            directory(run.root, FIRST, 20).receipt("model", 1),
            run.leases / "checkpoint-10-reader-1.json",
            run.quarantine_request(10),
            run.root / "notes.txt",
        )
    ]
    link = atomic.temporary_name(run.claims / "local-1-main.json")
    link.symlink_to(run.root / "notes.txt")
    folder = atomic.temporary_name(run.root / "merged")
    (folder / "model").mkdir(parents=True)
    # Without the registration of step 20: what is staged there is not tidied away.
    directory(run.root, FIRST, 20).registration.unlink()
    start(run.root)
    assert [path for path in theirs if not path.exists()] == []
    assert link.is_symlink()
    assert (folder / "model").is_dir()


def test_a_monitor_that_may_not_write_sweeps_nothing(run: RunDirectory) -> None:
    left = half_written(run.resume_target)
    asked = 0

    def gate() -> None:  # lost between the look at the directory and the removal
        nonlocal asked
        asked += 1
        if asked > 1:
            raise errors.NotReadyError("it does not hold the Lease")

    MonitorCore(run, CoreSettings(), clock=Clock(), authority=Authority(gate=gate)).tick()
    assert asked > 1
    assert left.exists()


def test_one_that_cannot_be_removed_keeps_no_monitor_from_its_work(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = half_written(run.resume_target)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == left:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    core = start(run.root)
    assert core.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.COMMITTED
