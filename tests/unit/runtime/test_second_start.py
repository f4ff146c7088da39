"""A second start of a local run: refused while the first lives, next in line when it is dead."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.monitor.errors import ClaimRefusedError
from trainsync.runtime.context import RunContext
from trainsync.storage import hosting
from trainsync.storage.inspect.activity import sign_of_life
from trainsync.storage.layout import RunDirectory


@pytest.fixture
def first(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that hosts the run ``tmp_path / "run"``."""
    command = [sys.executable, "-m", "tests.unit.runtime.hosting_job", str(tmp_path / "run")]
    environ = {key: value for key, value in os.environ.items() if "TRAINSYNC" not in key}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        yield process
        process.kill()


def start(tmp_path: Path) -> RunContext:
    return RunContext.from_env(tmp_path / "run", environ={})


def test_it_is_refused_while_the_first_lives_and_takes_over_when_it_is_killed(
    tmp_path: Path, first: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting.Hosting.__init__, "__defaults__", (0.2,))
    with pytest.raises(ClaimRefusedError, match=f"is at work.*held by process {first.pid} on "):
        start(tmp_path)
    first.kill()
    first.wait()
    with start(tmp_path) as second:
        assert second.attempt == 1
        with pytest.raises(ClaimRefusedError, match=f"held by process {os.getpid()} on "):
            start(tmp_path)
    with start(tmp_path) as third:
        assert third.attempt == 2


def test_a_worker_that_outlives_its_parent_does_not_host(tmp_path: Path) -> None:
    context = start(tmp_path)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        context.close()
        start(tmp_path).close()
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(child, 0)


def test_a_run_whose_host_has_ended_is_not_taken_to_be_at_work(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with start(tmp_path):
        assert "was changed" in str(sign_of_life(run, time.time()))
    assert sign_of_life(run, time.time()) is None
