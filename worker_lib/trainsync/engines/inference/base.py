"""What an explorer needs of an inference engine to bring it to new weights: two methods.

`ExplorerClient.update` takes anything that has them. Adapters: `ModuleEngine` for a module of
torch or transformers, `VLLMEngine` and `SGLangEngine` for those engines.
"""

import inspect
from collections.abc import Coroutine, Iterable, Iterator
from typing import Protocol

import torch

from trainsync.engines.errors import EngineUpdateError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class InferenceEngine(Protocol):
    """An engine that takes new weights. The caller lets nothing be generated meanwhile."""

    def begin_update(self, version: int) -> None:
        """What `load_weights` brings next is ``version``. Raise to keep what is served."""
        ...

    def load_weights(self, weights: NamedTensors) -> object:
        """Take full tensors, which are not valid any more when it has returned.

        They are on the CPU, unless the explorer asked for a GPU.

        An engine that raises after it has begun to change its weights must not be used before a
        later update has succeeded.
        """
        ...


def refuse_awaitable(version: int, call: str, answer: object) -> None:
    """What an engine's ``call`` returned is an answer, and no promise that nobody would await.

    Raises:
        EngineUpdateError: it is to be awaited, so that nothing has happened yet.
    """
    if inspect.isawaitable(answer):
        if isinstance(answer, Coroutine):
            answer.close()
        raise EngineUpdateError(
            f"version {version} is not loaded: {call} returned {type(answer).__name__} to be "
            "awaited; expected an engine that is not asynchronous"
        )


def in_buckets(weights: NamedTensors, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights in order, in lists of at most ``size`` bytes; one that is larger comes alone.

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
