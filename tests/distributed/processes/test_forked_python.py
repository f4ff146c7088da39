"""Processes that tests have forked end as those that Python starts."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.processes.forked_workers import forked_python
from tests.waiting import eventually

pytestmark = pytest.mark.distributed

SECONDS = 60.0


def test_it_has_its_own_input_and_output_and_its_exit_code_is_told() -> None:
    for given, code, stream in (('{"a": 1}', 0, "stdout"), ("{", 1, "stderr")):
        command = [*forked_python(), "-m", "json.tool", "--compact"]
        ended = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == code
        assert ('{"a":1}' if code == 0 else "Expecting") in getattr(ended, stream)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_is_told(number: signal.Signals) -> None:
    command = [*forked_python(), "-m", "tests.distributed.processes.said_pid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(SECONDS) == -number
    eventually(lambda: not Path(f"/proc/{pid}").exists(), SECONDS)
