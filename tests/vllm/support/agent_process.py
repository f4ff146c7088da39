"""``python -m trainsync.agent`` as a process beside a server."""

import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from tests.ports import port_of, reserved_port
from tests.vllm.support.server import CALL_SECONDS
from tests.waiting import eventually

_AGENT: Final = ("-m", "trainsync.agent")
_STOP_SECONDS: Final = 60.0


class AgentProcess:
    """An agent, or a program that takes its options.

    Args:
        python: the interpreter.
        variables: the process's environment; None: that of this process.
        options: of the agent, beside its port.
        program: what the interpreter runs; empty: the agent.
        reserved: its port, which stays reserved; None: a free one.
    """

    def __init__(
        self,
        python: str | Path,
        variables: Mapping[str, str] | None,
        options: Sequence[str | Path],
        program: Sequence[str | Path] = (),
        reserved: socket.socket | None = None,
    ) -> None:
        bound = reserved or reserved_port()
        self._own = None if reserved else bound
        port = port_of(bound)
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [python, *(program or _AGENT), *options, "--port", str(port)],
            env=variables,
        )

    def get(self, path: str) -> httpx.Response | None:
        """None while it does not answer."""
        with suppress(httpx.HTTPError):
            return httpx.get(self.url + path, timeout=CALL_SECONDS, trust_env=False)
        return None

    @property
    def ready(self) -> bool:
        answer = self.get("/readyz")
        return answer is not None and answer.is_success

    @property
    def status(self) -> dict[str, Any]:
        answer = self.get("/status.json")
        return {} if answer is None else dict(answer.json())

    def until_ready_with(self, version: int) -> None:
        eventually(lambda: self.status.get("version") == version and self.ready, CALL_SECONDS)

    def stop(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            if self._own is not None:
                self._own.close()


@contextmanager
def ending_in_order() -> Iterator[list[AgentProcess]]:
    """A list for agents: those that still run at the end must end in order."""
    agents: list[AgentProcess] = []
    yield agents
    ended = [agent.stop() for agent in agents if agent.process.poll() is None]
    assert set(ended) <= {0}
