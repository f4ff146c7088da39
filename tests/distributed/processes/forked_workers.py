"""Ray's workers, and other processes, without imports: see `worker_server` beside this file."""

import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

_SOCKET: Final = "FORKED_WORKERS_SOCKET"
_SERVER: Final = "tests.distributed.processes.worker_server"
_CLIENT: Final = Path(__file__).with_name("worker_client.py")
_MODULES: Final = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "trainsync.checkpoint.coordinator",
    "trainsync.runtime.context",
    # A third of Ray's imports. Its core reads a worker's environment when it is imported.
    "google.protobuf.json_format",
    "jsonschema",
    "requests",
    "trainsync.weights.delta.compact_kernel",  # compiled as it is imported: 2.6 s of a core
)


def forked_workers() -> dict[str, str]:
    """Environment of a driver of which Ray's workers are forked.

    For the driver's process alone: Ray's workers of another user may not connect to the server, and
    a process that is forked with this environment keeps it. Not for a Ray whose workers differ from
    this process in more than environment and directory, such as in a network namespace.
    """
    return {_SOCKET: _server(), "RAY_RUNTIME_ENV_HOOK": f"{__name__}.with_forked_workers"}


def with_forked_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook: the runtime environment of a job, and Python as `forked_workers` has it."""
    return {**(runtime_env or {}), "py_executable": _python(os.environ[_SOCKET])}


def forking_python(*modules: str) -> str:
    """``py_executable`` of a runtime environment whose workers are forked, in a job of this
    process, with these modules beside the usual ones."""
    return _python(_server(*modules))


def forked_python() -> list[str]:
    """What stands before ``-m`` and a module in the command of a process that is forked.

    The process ends as one that Python starts, and its handle has its exit code; the handle's pid
    is another. SIGTERM, SIGINT and SIGKILL reach it, other signals do not.
    """
    return _command(_server())


def _python(socket: str) -> str:
    return shlex.join(_command(socket))


def _command(socket: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(_CLIENT), socket]


@cache
def _server(*modules: str) -> str:
    """The socket of this process's server, which ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="ray-workers-"), "socket")
    server = subprocess.Popen(
        [sys.executable, "-m", _SERVER, str(path), *_MODULES, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return str(path)
