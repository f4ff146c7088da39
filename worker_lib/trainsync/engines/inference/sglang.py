"""Load new weights into SGLang through ``update_weights_from_tensor``.

From 0.5.23 on SGLang takes tensors in a session alone, at whose begin and end it unpacks and packs
what it derives from weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import NamedTensors, in_buckets, refuse_awaitable


class OfflineEngine(Protocol):
    """The methods of ``sglang.Engine`` that the adapter calls."""

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> Any:
        """Returns (success, message)."""
        ...

    def begin_weight_update(self) -> Any:
        """Returns (success, message). Older versions do not have it, nor the next one."""
        ...

    def end_weight_update(self) -> Any:
        """Returns (success, message)."""
        ...


class SGLangEngine:
    """A ``sglang.Engine``.

    Every rank gets all weights and takes its share, in any parallelism. No LoRA adapters.

    Args:
        bucket_size: bytes of weights in one call.
    """

    def __init__(self, engine: OfflineEngine, *, bucket_size: int = 256 << 20) -> None:
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
        with self._session():
            return self._send_all(weights)

    def _send_all(self, weights: NamedTensors) -> int:
        count = 0
        buckets = in_buckets(weights, self._bucket_size)
        bucket = next(buckets, None)
        while bucket is not None:
            following = next(buckets, None)
            self._send(bucket, last=following is None)
            count += len(bucket)
            bucket = following
        return count

    @contextmanager
    def _session(self) -> Iterator[None]:
        if not hasattr(self._engine, "begin_weight_update"):
            yield
            return
        self._check("begin_weight_update", self._engine.begin_weight_update())
        try:
            yield
        except BaseException as error:
            # Else the session would refuse the next version.
            try:
                self._check("end_weight_update", self._engine.end_weight_update())
            except EngineUpdateError as second:
                error.add_note(str(second))
            raise
        self._check("end_weight_update", self._engine.end_weight_update())

    def _send(self, bucket: list[tuple[str, torch.Tensor]], *, last: bool) -> None:
        # SGLang passes tensors to its processes by reference, which keeps them in shared memory.
        own = [(name, tensor.detach().clone()) for name, tensor in bucket]
        answer = self._engine.update_weights_from_tensor(own, flush_cache=last)
        self._check("update_weights_from_tensor", answer)

    def _check(self, call: str, answer: Any) -> None:
        """Raise unless ``answer`` says success."""
        refuse_awaitable(self._coming, call, answer)
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
