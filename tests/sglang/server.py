"""A real SGLang server on the CPU, in the environment of ``make sglang-env``."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx

from tests.environments import environment_of
from tests.ports import port_of, reserved_port
from tests.vllm.support.server import CALL_SECONDS, ROOT, START_SECONDS

_BEGUN: Final = 8  # tokens


def sglang_environment() -> Path:
    """See `environment_of`."""
    return environment_of("SGLANG_ENV", "SGLang", "test-sglang")


def environment() -> dict[str, str]:
    """Variables for a process that imports SGLang and this checkout."""
    return {
        **os.environ,
        "PATH": f"{sglang_environment() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'worker_lib'}{os.pathsep}{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def generate(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """``meta_info`` of the answer to a greedy request for ``count`` tokens."""
        answer = httpx.post(
            f"{self.url}/generate",
            json=_request(prompt, count),
            timeout=CALL_SECONDS,
            trust_env=False,
        )
        answer.raise_for_status()
        return dict(answer.json()["meta_info"])

    def stream(self, prompt: Sequence[int], count: int, began: threading.Event) -> dict[str, Any]:
        """The same; ``began`` is set with the first tokens."""
        found: dict[str, Any] = {}
        body = {**_request(prompt, count), "stream": True}
        with httpx.stream(
            "POST", f"{self.url}/generate", json=body, timeout=CALL_SECONDS, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: "))["meta_info"]
                    if len(found["output_token_logprobs"]) >= _BEGUN:
                        began.set()
        return found

    def kill(self) -> None:
        """End it at once with all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _request(prompt: Sequence[int], count: int) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }


def serve(
    model: Path,
    scratch: Path,
    *options: str,
    reserved: socket.socket | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    """Start a server and wait until it answers.

    Args:
        variables: of its environment, beside `environment`.
        reserved: its port, which stays reserved; None: a free one.

    Raises:
        RuntimeError: it ended, or did not answer in time; with the end of its log.
    """
    bound = reserved or reserved_port()
    log = scratch / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sglang_environment() / "bin" / "sglang", "serve", "--model-path", model,
                "--host", "127.0.0.1", "--port", str(port_of(bound)),
                "--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native",
                "--sampling-backend", "pytorch", "--max-total-tokens", "8192",
                "--max-running-requests", "8", "--mem-fraction-static", "0.3",
                "--skip-server-warmup", *options,
            ],
            env={**environment(), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port_of(bound)}", process, log)
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/ready", timeout=5, trust_env=False).is_success:
                    return server
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer:\n{log.read_text()[-8000:]}")
            time.sleep(0.2)
    except BaseException:
        server.kill()
        raise
    finally:
        if reserved is None:
            bound.close()
