"""A checkpoint engine for verl (verl's name for the sender of weights to rollouts) by broadcast.

Importing this module registers the backend ``trainsync`` with verl::

    rollout.checkpoint_engine.backend=trainsync
    rollout.checkpoint_engine.custom_backend_module=trainsync.integrations.verl.backend
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from trainsync.integrations.verl.lost_adapter import refuse_lost_adapter
from trainsync.integrations.verl.options import SyncOptions
from trainsync.integrations.verl.receiving import Receiver
from trainsync.integrations.verl.sending import Sender, gather_along
from trainsync.weights.errors import WeightsError

logger = logging.getLogger(__name__)

BACKEND: Final = "trainsync"

_SEND: Final = "send"
_GATHER: Final = "gather"
_RECEIVE: Final = "receive"


@CheckpointEngineRegistry.register(BACKEND)
class TrainsyncCheckpointEngine(CheckpointEngine):
    """One worker's part in sending weights from verl's trainer to its rollouts.

    verl's manager calls, for every synchronisation and on every worker: `prepare`, `build_topology`
    (once), `init_process_group`, `send_weights` or `receive_weights`, `finalize`. After a failed
    synchronisation the next one starts with `prepare`.

    The first trainer rank broadcasts; every rollout worker checks the digest of all bytes before
    the inference engine gets them. A rollout that dies or hangs is dropped, and the others get the
    weights within ``timeout_seconds``.

    Args:
        bucket_size: verl's ``update_weights_bucket_megabytes`` in bytes; the largest message.
        is_master: whether this is the first trainer rank.
        bucket_megabytes: size of one message.
        timeout_seconds: limit of a whole synchronisation.
        delta: rollouts on other hosts get only the changes since the last version.
        same_host: rollouts on the sender's host read the weights from shared memory.
        rollout_dtype: dtype, such as ``bfloat16``, in which floating-point weights are sent.
        host: the sender's address; by default the node's address in Ray.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        bucket_megabytes: int = 16,
        timeout_seconds: float = 600.0,
        delta: bool = False,
        same_host: bool = True,
        rollout_dtype: str | None = None,
        host: str | None = None,
    ) -> None:
        refuse_lost_adapter()
        self._options = SyncOptions.of(
            bucket_size, bucket_megabytes, timeout_seconds, delta, same_host, rollout_dtype, host
        )
        self._sender = Sender(self._options) if is_master else None
        self._receiver: Receiver | None = None
        self._role = ""
        self._version = -1
        self._rollouts: list[str] = []
        self._given_up = threading.Event()

    def prepare(self) -> dict[str, Any]:
        """Begin a synchronisation; returns this worker's metadata for the others."""
        self.finalize()
        if self._sender is not None:
            return {"endpoint": self._sender.endpoint, "version": self._sender.version}
        if self._receiver is None:
            self._receiver = Receiver(self._options)
        return {"name": self._receiver.name, "version": self._receiver.version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for each trainer rank and each rollout worker.

        The version is the highest of all workers plus one: verl's own step may repeat.
        """
        expected = actor_wg_world_size + rollout_world_size
        if len(metadata) != expected or "endpoint" not in metadata[0]:
            raise ValueError(
                f"got what {len(metadata)} workers prepared; expected {expected}, the first of "
                "them that of the trainer rank with is_master"
            )
        version = 1 + max(part["version"] for part in metadata)
        rollouts = [part["name"] for part in metadata[actor_wg_world_size:]]

        def arguments(roles: list[str]) -> dict[str, list[Any]]:
            return {
                "role": roles,
                "endpoint": [metadata[0]["endpoint"]] * len(roles),
                "version": [version] * len(roles),
                "rollouts": [rollouts] * len(roles),
            }

        trainers = [_SEND] + [_GATHER] * (actor_wg_world_size - 1)
        return arguments(trainers), arguments([_RECEIVE] * rollout_world_size)

    def init_process_group(self, **kwargs: Any) -> None:
        """Set this worker's role from `build_topology`; returns at once."""
        self._role, self._version = kwargs["role"], kwargs["version"]
        self._rollouts = kwargs["rollouts"]
        if self._role == _RECEIVE and self._receiver is not None:
            self._receiver.follow(kwargs["endpoint"])

    def finalize(self) -> None:
        """End the synchronisation; keeps links and memory for the next one."""
        self._role = ""
        self._given_up.set()
        self._given_up = threading.Event()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send or gather without blocking the worker's event loop; returns metrics for verl's log.

        A rollout without the weights is logged and counted, not raised here: its own worker raises.

        Raises:
            WeightsError: no rollout got the weights.
            GatherFailedError: a trainer rank is gone, or a weight could not be gathered.
        """
        if self._role == _GATHER:
            await asyncio.to_thread(gather_along, weights, self._options)
            return {}
        if self._role != _SEND or self._sender is None:
            raise WeightsError("send_weights was called before init_process_group")
        report = await asyncio.to_thread(self._sender.send, weights, self._version, self._rollouts)
        logger.info("step %s: weights sent: %s", global_steps, report)
        return report.metrics()

    # verl annotates another return type than its own engines have.
    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of all weights of the version, after the digest check.

        Raises:
            WeightsError: the version did not arrive within ``timeout_seconds``, or the sender gave
                it up.
        """
        if self._role != _RECEIVE or self._receiver is None:
            raise WeightsError("receive_weights was called before init_process_group")
        logger.info("step %s: waiting for weights", global_steps)
        async for item in self._receiver.weights(self._version, self._given_up):
            yield item
