"""The two methods that an explorer calls to load new weights into an inference engine.

`ExplorerClient.update` accepts any object with both methods. Adapters: `ModuleEngine` for a module
of torch or transformers, `VLLMEngine` and `SGLangEngine` for those engines.
"""

import inspect
from collections.abc import Coroutine, Iterable, Iterator
from typing import Protocol

import torch

from trainsync.engines.errors import EngineUpdateError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class InferenceEngine(Protocol):
    """An engine that loads new weights. The caller stops generation during an update."""

    def begin_update(self, version: int) -> None:
        """The next `load_weights` brings ``version``. Raise to keep the current weights."""
        ...

    def load_weights(self, weights: NamedTensors) -> object:
        """Load full tensors, which are valid only until this method returns.

        The tensors are on the CPU, unless the explorer asked for a GPU.

        An engine that raises after it has begun to change its weights must not be used before a
        later update has succeeded.
        """
        ...


def refuse_awaitable(version: int, call: str, answer: object) -> None:
    """Check that an engine's ``call`` returned a value, not an awaitable that is never awaited.

    Raises:
        EngineUpdateError: the call returned an awaitable, so the engine has done nothing yet.
    """
    if inspect.isawaitable(answer):
        if isinstance(answer, Coroutine):
            answer.close()
        raise EngineUpdateError(
            f"version {version} is not loaded: {call} returned {type(answer).__name__} to be "
            "awaited; expected an engine that is not asynchronous"
        )


def in_buckets(weights: NamedTensors, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights in order, in lists of at most ``size`` bytes; a larger weight gets a list of its
    own.

    Raises:
        ValueError: the size is not positive.
    """
    if size <= 0:
        raise ValueError(f"the size of a bucket must be more than 0 bytes, got {size}")
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
