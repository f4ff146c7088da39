"""A process that ends with a save in flight keeps its exit code and its saves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.runtime.stop.ending_job import STEPS


def run_job(how: str, root: Path, times: int) -> list[list[int]]:
    """Exit code and newest committed step of each child."""
    command = [
        sys.executable,
        "-m",
        "tests.unit.runtime.stop.ending_job",
        how,
        str(root),
        str(times),
    ]
    environ = {key: value for key, value in os.environ.items() if "TRAINSYNC" not in key}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    ended: list[list[int]] = json.loads(done.stdout)
    return ended


@pytest.mark.parametrize(
    ("how", "code"), [("bug in with", 1), ("bug", 1), ("close", 0), ("", 0), ("sigterm", 143)]
)
def test_a_script_ends_with_its_own_exit_code_and_its_last_save_is_committed(
    tmp_path: Path, how: str, code: int
) -> None:
    ended = run_job(how, tmp_path, times=3)
    logs = [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
    assert ended == [[code, STEPS]] * 3, logs
    assert all(("a bug in training" in log) == (code == 1) for log in logs)


def test_what_lacks_another_ranks_part_is_named_when_the_monitor_ends(tmp_path: Path) -> None:
    [ended] = run_job("other rank", tmp_path, times=1)
    assert ended == [0, None]
    log = (tmp_path / "0.log").read_text()
    assert "the monitor ends, and these saves are not committed" in log
    assert "checkpoint 2 of attempt 0, lacks model.1" in log


def test_ctrl_c_ends_a_script_that_waits_for_a_commit_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.runtime.stop.waiting_job", str(tmp_path / "run")]
    environ = {key: value for key, value in os.environ.items() if "TRAINSYNC" not in key}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(1.0)  # in the question, or on its way there: either must end
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
        seconds = time.monotonic() - interrupted
    assert process.returncode == -signal.SIGINT, log
    assert "KeyboardInterrupt" in log
    assert seconds < 12.0, f"1 s on a machine that is not busy, 20 s before: {seconds}"
