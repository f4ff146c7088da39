"""Processes forked from a server that has imported torch once: milliseconds instead of seconds.

The server starts with the first process. Until then a test module says, when it is imported, what
else its processes need; so each choice of tests waits for what it needs, and for no more.
"""

import multiprocessing
from typing import Final

CONTEXT: Final = multiprocessing.get_context("forkserver")
UNDER_VERL: Final = (
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "peft",
    "tensordict",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Most of what verl imports. verl itself looks for its device then."""

_modules: Final = {"torch._dynamo", "torch.distributed.fsdp"}  # fully_shard imports dynamo too


def preload(*modules: str) -> None:
    """Import these in the server; one that is not installed is passed over.

    Not for what looks at its environment when it is imported, or is changed for a test then: the
    processes of all tests get it as the server has it.
    """
    _modules.update(modules)
    CONTEXT.set_forkserver_preload(sorted(_modules))


preload()
