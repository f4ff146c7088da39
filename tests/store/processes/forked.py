"""Processes that kill themselves, forked from a server that has imported torch once."""

import os
import runpy
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.distributed.processes.forked import CONTEXT, preload

_SECONDS: Final = 120.0

preload(
    "obstore",
    "trainsync.agent.agent",
    "trainsync.checkpoint.coordinator",
    "trainsync.runtime.context",
    "trainsync.weights.delta.compact_kernel",  # compiled as it is imported: 2.6 s of a core
    "typer",
)


def run_killed(module: str, *arguments: object) -> None:
    """``python -m module arguments``, with this process's environment; it must end by SIGKILL."""
    with TemporaryDirectory(prefix="killed-") as directory:
        log = Path(directory, "log")
        words = [module, *map(str, arguments)]
        process = CONTEXT.Process(target=_run, args=(words, dict(os.environ), str(log)))
        process.start()
        process.join(_SECONDS)
        try:
            assert process.exitcode == -signal.SIGKILL, (process.exitcode, log.read_text()[-4000:])
        finally:
            process.kill()
            process.join(10)


def _run(words: list[str], environ: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
