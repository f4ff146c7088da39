"""``vllm serve`` on this machine's CPU, each with its agent, in the environment of vLLM.

On Kubernetes none of this is needed: pods do it.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
from trainsync.api import env

from images.metadata import write_metadata
from vllm_grpo.rollouts import Server

SETTINGS: Final = {
    env.SYNC_METHOD: "checkpoint",
    env.SYNC_STYLE: "fully_async",
    env.SYNC_INTERVAL: "2",
    env.SYNC_MAX_STALENESS: "4",
    env.CHECKPOINT_INTERVAL: "20",
}
"""Of trainer and agents; on Kubernetes the operator sets them, from ``spec.sync``."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_STOP_SECONDS: Final = 30.0
_LOG_TAIL: Final = 4000


class ServerEndedError(Exception):
    """A server or an agent ended by itself, or did not answer in time; with the end of its log."""


def environment(vllm: Path, plugin: Path) -> dict[str, str]:
    """Variables for a process that imports vLLM and this checkout.

    Args:
        vllm: the virtual environment of ``make vllm-env``.
        plugin: a folder for the metadata by which vLLM finds trainsync's entry point, as if this
            checkout was installed there.
    """
    write_metadata(plugin)
    return {
        **os.environ,
        "PATH": f"{vllm / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{_ROOT / 'worker_lib'}{os.pathsep}{plugin}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }


class LocalServer:
    """One server and its agent, each of which keeps its port when it is started again.

    Args:
        vllm: the virtual environment.
        model: the folder that the server is started with.
        run: the run's directory.
        scratch: for logs.
        variables: of the agent, such as the run's ``TRAINSYNC_SYNC_*``.

    Attributes:
        name: of both.
    """

    def __init__(
        self,
        name: str,
        vllm: Path,
        model: Path,
        run: Path,
        scratch: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.name = name
        self._vllm = vllm
        self._model = model
        self._run = run
        self._scratch = scratch
        self._environment = environment(vllm, scratch / "plugin") | {
            # Two servers and a trainer share the cores: one thread each, bound to none.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **variables,
        }
        self._ports = [_reserved_port(), _reserved_port()]
        self._server: subprocess.Popen[bytes] | None = None
        self._agent: subprocess.Popen[bytes] | None = None

    @property
    def at(self) -> Server:
        """Where clients find both."""
        url, agent = (f"http://127.0.0.1:{port.getsockname()[1]}" for port in self._ports)
        return Server(self.name, url, agent)

    def start(self) -> None:
        """Start the server; it answers after half a minute."""
        self._server = self._popen(
            self.name,
            self._vllm / "bin" / "vllm", "serve", self._model, "--host", "127.0.0.1",
            "--port", str(self._ports[0].getsockname()[1]), "--dtype", "float32",
            "--enforce-eager", "--max-num-seqs", "64", "--enable-scale-out",
            "--weight-transfer-config", '{"backend": "trainsync"}',
        )  # fmt: skip

    def start_agent(self) -> None:
        """Start the agent, which waits for the server and for the run."""
        self._agent = self._popen(
            f"{self.name}-agent",
            self._vllm / "bin" / "python", "-m", "trainsync.agent", "--server", self.at.url,
            "--directory", self._run, "--proof", "required",
            "--port", str(self._ports[1].getsockname()[1]),
        )  # fmt: skip

    def wait(self, seconds: float, *, ready: bool) -> None:
        """Until the server answers or, with ``ready``, until its agent says that it is ready.

        Raises:
            ServerEndedError: see there.
        """
        url = f"{self.at.agent}/readyz" if ready else f"{self.at.url}/health"
        deadline, why = time.monotonic() + seconds, "no answer"
        while True:
            try:
                answer = httpx.get(url, timeout=10.0, trust_env=False)
                if answer.is_success:
                    return
                why = answer.text.strip()
            except httpx.HTTPError as error:
                why = repr(error)
            for name, process in ((self.name, self._server), (f"{self.name}-agent", self._agent)):
                if process is not None and process.poll() is not None:
                    raise ServerEndedError(f"{name} ended:\n{self._tail(name)}")
            if time.monotonic() > deadline:
                raise ServerEndedError(
                    f"{self.name} is not there after {seconds:g} s: {why}\n{self._tail(self.name)}"
                )
            time.sleep(0.2)

    def refuted(self) -> int:
        """How often the agent refuted the server's weights."""
        answer = httpx.get(f"{self.at.agent}/metrics", timeout=10.0, trust_env=False)
        answer.raise_for_status()
        return gauge_in(answer.text, 'trainsync_agent_proofs_total{verdict="refuted"}')

    def kill(self, wait_seconds: float) -> None:
        """End the server with all its workers by SIGKILL, as a node that fails does.

        Args:
            wait_seconds: for which it waits until the server is answering, so that it dies then.
        """
        deadline = time.monotonic() + wait_seconds
        with suppress(httpx.HTTPError):
            while time.monotonic() < deadline:
                answer = httpx.get(f"{self.at.url}/metrics", timeout=10.0, trust_env=False)
                if gauge_in(answer.text, "vllm:num_requests_running"):
                    break
        _end(self._server, signal.SIGKILL)
        self._server = None

    def take_out(self) -> None:
        """End both in order: first the agent, so that no request comes any more."""
        _end(self._agent, signal.SIGTERM)
        _end(self._server, signal.SIGTERM)
        self._agent = self._server = None

    def close(self) -> None:
        """End what runs."""
        _end(self._agent, signal.SIGTERM)
        _end(self._server, signal.SIGKILL)
        for port in self._ports:
            port.close()

    def _popen(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group with its workers
            )

    def _log(self, name: str) -> Path:
        return self._scratch / f"{name}.log"

    def _tail(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")[-_LOG_TAIL:]


def gauge_in(metrics: str, name: str) -> int:
    """The first value of a metric, with its labels or without, in a page of metrics; 0: none."""
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(name)]
    return int(float(values[0])) if values else 0


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    """Signal a process group and wait; one that does not end is killed."""
    if process is None:
        return
    for number in (how, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return


def _reserved_port() -> socket.socket:
    """A free port; the socket keeps other processes from it, and not servers with SO_REUSEADDR."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound
