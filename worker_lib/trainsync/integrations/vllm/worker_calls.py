"""Methods that vLLM's workers get, to prepare versions, read adapters, and hear of their sleep.

vLLM's weight transfer has no calls for these: a call of an engine answers nothing, and holds up the
worker until it returns. vLLM's ``collective_rpc`` calls the methods by their names, and passes
answers on.
"""

from collections.abc import Callable
from typing import Any, Final

from vllm.lora.request import LoRARequest
from vllm.v1.worker.worker_base import WorkerBase

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.servers.adapter import CHECK_ADAPTER, FORGET_ADAPTERS
from trainsync.engines.servers.preparing import ABANDON, PREPARE, PREPARED
from trainsync.integrations.vllm.checks.adapters import misfit
from trainsync.integrations.vllm.sleeping import NOTE_SLEEP
from trainsync.weights.errors import SchemaMismatchError


def _prepare(worker: Any, seconds: float) -> dict[str, Any]:
    engine = worker.weight_transfer_engine
    engine.prepare(seconds)
    found: dict[str, Any] = engine.prepared()
    return found


def _prepared(worker: Any) -> dict[str, Any]:
    found: dict[str, Any] = worker.weight_transfer_engine.prepared()
    return found


def _abandon(worker: Any) -> dict[str, Any]:
    worker.weight_transfer_engine.abandon()
    return _prepared(worker)


def _check_adapter(worker: Any, folder: str) -> bool:
    """Load an adapter, and let go of it. An error while a request is served would end vLLM."""
    worker.weight_transfer_engine.check_awake()
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise EngineUpdateError("the server takes no adapters: start it with --enable-lora")
    adapter = manager._load_adapter(LoRARequest("trainsync-check", 1, folder))
    layers = manager._adapter_manager
    whole = worker.parallel_config.pipeline_parallel_size == 1
    wrong = misfit(adapter.loras, layers.modules, layers.packed_modules, whole=whole)
    if wrong is not None:
        raise SchemaMismatchError(wrong)
    return True


def _forget_adapters(worker: Any) -> bool:
    """As vLLM does when base weights are replaced: the next step that needs one reads it anew."""
    worker.weight_transfer_engine.check_awake()
    worker.model_runner.reset_lora_state()
    return True


def _note_sleep(worker: Any, asleep: bool) -> bool:
    whole: bool = worker.weight_transfer_engine.note_sleep(asleep=asleep)
    return whole


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    PREPARE: _prepare,
    PREPARED: _prepared,
    ABANDON: _abandon,
    CHECK_ADAPTER: _check_adapter,
    FORGET_ADAPTERS: _forget_adapters,
    NOTE_SLEEP: _note_sleep,
}


def add() -> None:
    """Give the methods to every worker of this process."""
    for name, method in _METHODS.items():
        setattr(WorkerBase, name, method)
