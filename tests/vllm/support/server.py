"""A real ``vllm serve`` on the CPU, in the environment of ``make vllm-env``."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from vllm_grpo import local_servers

from tests.environments import environment_of
from tests.ports import port_of, reserved_port

ROOT: Final = Path(__file__).resolve().parents[3]
START_SECONDS: Final = 480.0
CALL_SECONDS: Final = 120.0
MODEL: Final = "tiny"


def vllm_environment() -> Path:
    """See `environment_of`."""
    return environment_of("VLLM_ENV", "vLLM", "test-vllm")


def environment(plugin: Path) -> dict[str, str]:
    """Variables for a process that imports vLLM and this checkout.

    Args:
        plugin: a folder for the metadata by which vLLM finds trainsync's entry point.
    """
    return local_servers.environment(vllm_environment(), plugin)


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, prompt: Sequence[int], count: int, **options: Any) -> dict[str, Any]:
        """The answer to a greedy request for ``count`` tokens with their log-probabilities."""
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json={
                "model": MODEL,
                "prompt": list(prompt),
                "max_tokens": count,
                "temperature": 0,
                "logprobs": 0,
                "return_token_ids": True,
                **options,
            },
            timeout=CALL_SECONDS,
            trust_env=False,
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        return dict(choice)

    def stop(self) -> None:
        """End it with all its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serve(
    model: Path,
    scratch: Path,
    *options: str,
    variables: Mapping[str, str] | None = None,
    reserved: socket.socket | None = None,
    engine: bool = True,
) -> Server:
    """Start a server and wait until it answers.

    Args:
        reserved: its port, which stays reserved; None: a free one.
        engine: whether it has trainsync's engine for weights.

    Raises:
        RuntimeError: it ended, or did not answer in time; with the end of its log.
    """
    bound = reserved or reserved_port()
    log = scratch / "server.log"
    transfer = ("--weight-transfer-config", '{"backend": "trainsync"}') if engine else ()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                vllm_environment() / "bin" / "vllm", "serve", model,
                "--served-model-name", MODEL, "--port", str(port_of(bound)),
                "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "8192",
                "--max-num-seqs", "8", "--dtype", "bfloat16",
                *transfer, *options,
            ],
            env={**environment(scratch / "plugin"), **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port_of(bound)}", process, log)
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).is_success:
                    return server
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer:\n{log.read_text()[-8000:]}")
            time.sleep(0.2)
    except BaseException:
        server.stop()
        raise
    finally:
        if reserved is None:
            bound.close()
