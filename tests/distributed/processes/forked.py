"""Processes forked from a server that has imported torch once: milliseconds instead of seconds.

The server starts with the first process. Test modules register at their import the modules that
their processes need, so a selection of tests imports only those.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Final

CONTEXT: Final = multiprocessing.get_context("forkserver")
UNDER_VERL: Final = (
    "fastapi",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "pandas",
    "peft",
    "pyarrow.dataset",
    "tensordict",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Most of verl's imports. verl itself is not included: its import reads the device."""

_modules: Final = {"torch._dynamo", "torch.distributed.fsdp"}  # fully_shard imports dynamo too


def preload(*modules: str) -> None:
    """Import these modules in the server, except modules that are not installed.

    Not for modules that read the environment at import or that a test patches: the processes of all
    tests share the server's import.
    """
    _modules.update(modules)
    CONTEXT.set_forkserver_preload([*sorted(_modules), "tests.distributed.processes.frozen"])


def fork_instead_of_spawn(method: str | None = None) -> BaseContext:
    """For ``multiprocessing.get_context`` of a library that spawns processes, in a process that is
    forked itself: they come from the same server, in none of which a parent's state is either."""
    if method != "spawn":
        return multiprocessing.get_context(method)
    server = forkserver._forkserver  # type: ignore[attr-defined]
    # In Python 3.11 it takes a server that it has not started itself for none.
    server.ensure_running = lambda: None
    return CONTEXT


preload()
