"""A run's directory as left by a monitor, and changes that tests make."""

import os
import shutil
from pathlib import Path

import pytest
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, Clock, request, write_all

SAVES = ((10, CHECKPOINT), (20, STATE_DICT), (20, CHECKPOINT), (30, CHECKPOINT))


def build(root: Path) -> RunDirectory:
    """Steps 10, 20 and 30 committed, of two ranks each; step 20 also has a state dict."""
    directory = RunDirectory(root)
    core = MonitorCore(directory, CoreSettings(), clock=Clock())
    core.claim(FIRST, "main", None)
    for step, kind in SAVES:
        core.saves.register(FIRST, request(step, kind))
        write_all(root, FIRST, step, kind)
    core.tick()
    return directory


def make_old(root: Path, seconds: float = 7200) -> None:
    """Move all modification times back by ``seconds``."""
    for path in [root, *root.rglob("*")]:
        stamp = path.lstat().st_mtime - seconds
        os.utime(path, (stamp, stamp), follow_symlinks=False)


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A healthy run; tests must not change it."""
    return build(tmp_path_factory.mktemp("healthy") / "run")


@pytest.fixture
def run(tmp_path: Path, healthy: RunDirectory) -> RunDirectory:
    shutil.copytree(healthy.root, tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path)  # like a file just written
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def idle(run: RunDirectory) -> RunDirectory:
    """The run, without changes for two hours."""
    make_old(run.root)
    return run
