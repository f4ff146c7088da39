"""Load new weights into SGLang through ``update_weights_from_tensor``.

Written after SGLang's source and tested with an engine of the same signature only: SGLang does not
run on a CPU of this project's machines.
"""

from typing import Any, Protocol

import torch

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import NamedTensors, in_buckets, refuse_awaitable


class Engine(Protocol):
    """The methods of ``sglang.Engine`` that the adapter calls."""

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> Any:
        """Returns (success, message)."""
        ...


class SGLangEngine:
    """A ``sglang.Engine``.

    Every rank gets all weights and takes its share, whatever the parallelism. No LoRA adapters.

    Args:
        bucket_size: bytes of weights in one call.
    """

    def __init__(self, engine: Engine, *, bucket_size: int = 256 << 20) -> None:
        self._engine = engine
        self._bucket_size = bucket_size
        self._coming = -1

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    def load_weights(self, weights: NamedTensors) -> int:
        """See `InferenceEngine`. Returns the number of weights sent. The last call empties the
        cache.

        Raises:
            EngineUpdateError: SGLang refused (names the reason), or did not report success.
        """
        count = 0
        buckets = in_buckets(weights, self._bucket_size)
        bucket = next(buckets, None)
        while bucket is not None:
            following = next(buckets, None)
            self._send(bucket, last=following is None)
            count += len(bucket)
            bucket = following
        return count

    def _send(self, bucket: list[tuple[str, torch.Tensor]], *, last: bool) -> None:
        # SGLang passes tensors to its processes by reference, which keeps them in shared memory.
        own = [(name, tensor.detach().clone()) for name, tensor in bucket]
        answer = self._engine.update_weights_from_tensor(own, flush_cache=last)
        refuse_awaitable(self._coming, "update_weights_from_tensor", answer)
        match answer:
            case (bool() as succeeded, message):
                pass
            case _:
                raise EngineUpdateError(
                    f"version {self._coming} is not loaded: SGLang answered {answer!r}, "
                    "expected (whether it succeeded, a message)"
                )
        if not succeeded:
            raise EngineUpdateError(f"SGLang did not take version {self._coming}: {message}")
