"""A second agent of a server is refused for as long as the first one lives."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from trainsync.agent import only_agent as locking
from trainsync.agent.__main__ import main
from trainsync.agent.only_agent import AnotherAgentError

_URL = "http://127.0.0.1:8000"


only_agent = partial(locking.only_agent, wait=0.05)


def test_a_second_agent_is_refused_by_any_name_of_the_server(tmp_path: Path) -> None:
    with only_agent(tmp_path, _URL):
        for url in (_URL, "http://localhost:8000/", "https://[::1]:8000"):
            with (
                pytest.raises(AnotherAgentError, match=f"process {os.getpid()}"),
                only_agent(tmp_path, url),
            ):
                pass
        with only_agent(tmp_path, "http://127.0.0.1:8001"):
            pass
    assert not list(tmp_path.iterdir())
    with only_agent(tmp_path, _URL):
        pass


def test_a_second_agent_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_agent(tmp_path, _URL):
        options = [f"--server={_URL}", f"--directory={tmp_path}", f"--memory={tmp_path}"]
        assert main(options) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "another agent drives http://127.0.0.1:8000" in said[0]


def test_the_lock_goes_with_a_killed_agent(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from trainsync.agent.only_agent import only_agent\n"
        "with only_agent(Path(sys.argv[1]), sys.argv[2]):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, _URL], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(AnotherAgentError), only_agent(tmp_path, _URL):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with only_agent(tmp_path, _URL):
        pass
