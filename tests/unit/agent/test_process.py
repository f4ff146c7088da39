"""``python -m trainsync.agent`` as its users run it."""

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from tests.ports import port_of, reserved_port
from tests.unit.agent.conftest import has
from tests.unit.agent.fake_server import FakeServer
from tests.unit.agent.runs import Run, weights_of
from tests.waiting import eventually

_SECONDS = 90.0


def _ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=10, trust_env=False).is_success
    return False


def test_a_process_follows_alone_and_ends_in_order(
    run: Run, server: FakeServer, memory: Path
) -> None:
    run.commit(1)
    bound = reserved_port()
    command = [
        sys.executable, "-m", "trainsync.agent", "--server", server.url,
        "--directory", str(run.directory), "--memory", str(memory), "--port", str(port_of(bound)),
    ]  # fmt: skip
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: _ready(f"http://127.0.0.1:{port_of(bound)}"), _SECONDS)
        assert has(server, weights_of(1))
        second = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert second.returncode == 1
        assert second.stderr.startswith(f"trainsync agent: another agent drives {server.url}")
        agent.send_signal(signal.SIGTERM)
        _, log = agent.communicate(timeout=_SECONDS)
        assert agent.returncode == 0
        assert '"message": "the agent ends"' in log
        assert not list(memory.iterdir())
        assert not list((run.directory / ".trainsync" / "leases").glob("*.json"))
    finally:
        agent.kill()
        agent.communicate()
        bound.close()


def test_an_agent_ends_also_when_another_thread_than_the_main_one_gets_the_signal(
    run: Run, server: FakeServer, memory: Path
) -> None:
    bound = reserved_port()
    command = [
        sys.executable, "-m", "trainsync.agent", "--server", server.url,
        "--directory", str(run.directory), "--memory", str(memory), "--port", str(port_of(bound)),
    ]  # fmt: skip
    agent = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port_of(bound)}/healthz"

    def lives() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url, timeout=10, trust_env=False).is_success
        return False

    try:
        eventually(lives, _SECONDS)
        libc = ctypes.CDLL(None, use_errno=True)
        threads = {int(task.name) for task in Path(f"/proc/{agent.pid}/task").iterdir()}
        # The oldest first: the youngest may end before the signal reaches them.
        assert any(
            libc.tgkill(agent.pid, thread, signal.SIGTERM) == 0
            for thread in sorted(threads - {agent.pid})
        )
        assert agent.wait(_SECONDS) == 0
    finally:
        agent.kill()
        agent.wait()
        bound.close()


def test_an_agent_of_a_bucket_says_that_obstore_is_missing_in_one_sentence(
    server: FakeServer, memory: Path
) -> None:
    program = (
        "import sys; sys.modules['obstore'] = None; from trainsync.agent.__main__ import main; "
        "sys.exit(main())"
    )
    command = [
        sys.executable, "-c", program, "--server", server.url,
        "--directory", "s3://bucket/runs/a", "--memory", str(memory), "--port", "0",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("trainsync agent: s3://bucket/runs/a needs the package obstore")
    assert "pip install obstore`" in line
