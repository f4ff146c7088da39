"""Methods of vLLM's workers by which a version is prepared while they serve.

vLLM's weight transfer has no call for it: a call of an engine answers nothing, and holds up the
worker until it returns. vLLM's ``collective_rpc`` calls these by their names, and passes answers
on.
"""

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from trainsync.engines.servers.preparing import ABANDON, PREPARE, PREPARED


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


def add() -> None:
    """Give them to every worker of this process."""
    for name, method in ((PREPARE, _prepare), (PREPARED, _prepared), (ABANDON, _abandon)):
        setattr(WorkerBase, name, method)
