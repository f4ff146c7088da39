"""Processes forked from a server that has imported torch once: milliseconds instead of seconds.

The server starts with the first process. Test modules register at their import the modules that
their processes need, so a selection of tests imports only those.
"""

import multiprocessing
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
    CONTEXT.set_forkserver_preload([*sorted(_modules), "tests.distributed.frozen"])


preload()
