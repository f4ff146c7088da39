"""A process that ends with a save in flight keeps its exit code and its saves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.runtime.stop.ending_job import STEPS

TIMES = 3
CODES = {"bug in with": 1, "bug": 1, "closed": 0, "as it is": 0, "sigterm": 143}
OTHER_RANK = "other rank"


class Ended(NamedTuple):
    """What the scripts left: by the way to end, exit codes and newest committed steps; logs."""

    of: dict[str, list[list[int | None]]]
    directory: Path

    def logs(self, how: str) -> list[str]:
        return [log.read_text() for log in sorted((self.directory / how).glob("*.log"))]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """All scripts, one way to end after the other: they share one import of torch."""
    directory = tmp_path_factory.mktemp("ending")
    words = [str(directory), *(how for how in CODES for _ in range(TIMES)), OTHER_RANK]
    command = [sys.executable, "-m", "tests.unit.runtime.stop.ending_job", *words]
    environ = {key: value for key, value in os.environ.items() if "TRAINSYNC" not in key}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return Ended(json.loads(done.stdout), directory)


@pytest.mark.parametrize(("how", "code"), CODES.items())
def test_a_script_ends_with_its_own_exit_code_and_its_last_save_is_committed(
    ended: Ended, how: str, code: int
) -> None:
    logs = ended.logs(how)
    assert ended.of[how] == [[code, STEPS]] * TIMES, logs
    assert all(("a bug in training" in log) == (code == 1) for log in logs)


def test_what_lacks_another_ranks_part_is_named_when_the_monitor_ends(ended: Ended) -> None:
    assert ended.of[OTHER_RANK] == [[0, None]]
    (log,) = ended.logs(OTHER_RANK)
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
