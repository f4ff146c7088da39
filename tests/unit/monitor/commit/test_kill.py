"""Real processes, really killed: the next monitor's recovery from the disk."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveState
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage import atomic
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, receipts

from tests.reachable import let_everyone_enter
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    content,
    directory,
    receipt,
    request,
    stage,
    write,
    write_all,
)

FAILURE = FailureReport(
    kind=CHECKPOINT, step=20, participant=ParticipantRef(component="model", rank=1), error="boom"
)
REPOSITORY = Path(__file__).parents[4]


def fresh_core(root: Path, **settings: int) -> MonitorCore:
    return MonitorCore(
        RunDirectory(root),
        CoreSettings(**settings),  # type: ignore[arg-type]
        clock=lambda: datetime.now(UTC),
    )


def killed_at(root: Path, phase: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.monitor.killed", str(root), phase],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def assert_whole(root: Path) -> None:
    """Nothing torn: the pointer's target and every manifest are complete, byte for byte."""
    run = RunDirectory(root)
    steps = manifest.committed_steps(run, CHECKPOINT)
    assert pointers.read_pointer(run, CHECKPOINT) in steps
    for step in steps:
        committed = manifest.read_manifest(run, CHECKPOINT, step).manifest
        manifest.check_manifest(run, committed, with_digest=True)
        assert len(committed.files) == 2
        for rank in range(2):
            file = run.step(step) / f"actor/checkpoint_rank_{rank}.pt"
            assert file.read_bytes() == content(FIRST, CHECKPOINT, step, rank)


@pytest.mark.parametrize(
    "phase",
    [
        "promoting:1",
        "promoting:2",
        "promoted",
        "manifest",
        "pointing",
        "pointer",
        "retention:2",  # the first comes with the start
        "cleaned:2",
    ],
)
def test_a_monitor_killed_at_any_phase_leaves_nothing_torn_and_the_next_one_finishes(
    tmp_path: Path, phase: str
) -> None:
    core = fresh_core(tmp_path)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    write_all(tmp_path, FIRST, 20)

    killed_at(tmp_path, phase)
    assert_whole(tmp_path)

    again = fresh_core(tmp_path, max_to_keep=1)
    again.tick()
    status = again.saves.save_status(FIRST, CHECKPOINT, 20)
    assert status.state is SaveState.COMMITTED
    assert_whole(tmp_path)
    assert RunDirectory(tmp_path).steps() == [20]
    assert pointers.read_pointer(RunDirectory(tmp_path), CHECKPOINT) == 20
    assert list(RunDirectory(tmp_path).trash.iterdir()) == []
    assert not directory(tmp_path, FIRST, 20).files.exists()
    resumed = again.resume(FIRST)
    assert resumed is not None
    assert resumed.step == 20


def test_a_monitor_killed_amid_an_abort_commits_nothing_and_can_be_told_again(
    tmp_path: Path,
) -> None:
    core = fresh_core(tmp_path)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(10))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    write(tmp_path, FIRST, 20, 0)
    killed_at(tmp_path, "aborting")
    assert_whole(tmp_path)

    again = fresh_core(tmp_path)
    again.tick()
    assert again.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.REGISTERED
    again.saves.failure(FIRST, FAILURE)
    assert again.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.ABORTED
    assert_whole(tmp_path)
    assert RunDirectory(tmp_path).steps() == [10]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, to be filled for real."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    volume = Path(tempfile.mkdtemp(dir=tmp_path))
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(volume)], check=True, timeout=20
    )
    yield volume
    subprocess.run(["umount", str(volume)], check=True, timeout=20)


def fill(volume: Path) -> Path:
    ballast = volume / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                return ballast


def test_a_full_volume_aborts_the_save_with_the_cause_and_the_monitor_lives(
    small_volume: Path,
) -> None:
    run = RunDirectory(small_volume)
    core = fresh_core(small_volume, io_tries=1)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(10))
    write_all(small_volume, FIRST, 10)
    core.tick()
    core.saves.register(FIRST, request(20))
    write_all(small_volume, FIRST, 20)
    ballast = fill(small_volume)
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 20)
    assert status.state is SaveState.ABORTED
    assert "No space left on device" in str(status.error)
    assert_whole(small_volume)
    assert run.steps() == [10]
    assert "No space left" in str(core.view().checkpoint.last_error)

    ballast.unlink()
    core.saves.register(FIRST, request(30))
    write_all(small_volume, FIRST, 30)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 30).state is SaveState.COMMITTED
    assert_whole(small_volume)


def test_a_participant_of_another_user_can_share_the_volume(tmp_path: Path) -> None:
    """The monitor is user 65532; pods are any user of its group, with any umask."""
    if os.geteuid() != 0:
        pytest.skip("acting as other users needs root")
    let_everyone_enter(tmp_path)
    root = tmp_path / "volume"
    root.mkdir()
    os.chown(root, -1, 65532)
    root.chmod(0o2775)

    def monitor() -> None:
        core = fresh_core(root, max_to_keep=1)
        core.claim(FIRST, "main", None)
        for step in (10, 20):
            core.saves.register(FIRST, request(step, ranks=1))

    def trainer() -> None:
        for step in (10, 20):
            entry = stage(root, FIRST, step, 0)
            file = directory(root, FIRST, step).files / entry.path
            file.chmod(atomic.FILE_MODE)
            receipts.write_receipt(
                directory(root, FIRST, step), receipt(FIRST, step, 0, CHECKPOINT, entry)
            )

    def commits() -> None:
        core = fresh_core(root, max_to_keep=1)
        core.tick()
        assert core.saves.save_status(FIRST, CHECKPOINT, 20).state is SaveState.COMMITTED
        assert RunDirectory(root).steps() == [20]
        assert core.view().checkpoint.last_error is None

    for user, act in ((65532, monitor), (1234, trainer), (65532, commits)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([65532])
                os.setgid(user)
                os.setuid(user)
                os.umask(0o077)
                act()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, f"{act.__name__} as {user} failed"
