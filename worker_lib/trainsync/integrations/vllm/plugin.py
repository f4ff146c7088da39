"""vLLM's entry point: vLLM calls `register` in each of its processes."""

from contextlib import suppress
from typing import Final

from trainsync.integrations.vllm.replies import read_all_replies
from trainsync.integrations.vllm.sleeping import note_sleep

BACKEND: Final = "trainsync"
"""For ``--weight-transfer-config '{"backend": "trainsync"}'``."""


def register() -> None:
    """Tell vLLM of the engine; calls after the first change nothing.

    A vLLM that cannot be told is left as it is: an error here would keep vLLM from starting, and a
    vLLM that is configured for the engine names the lack itself.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # before vLLM had engines
        return
    with suppress(ImportError):  # a vLLM whose executors are elsewhere
        from vllm.v1.executor import multiproc_executor

        read_all_replies(multiproc_executor)
    with suppress(ImportError):
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        note_sleep(EngineCore, Executor, BACKEND)
    with suppress(ValueError):  # the engine is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "trainsync.integrations.vllm.transfer", "TrainsyncEngine"
        )
