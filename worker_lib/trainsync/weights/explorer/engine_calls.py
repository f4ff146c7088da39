"""Gives an explorer's engine new weights, and refuses calls that nothing would await.

Without Ray: engines' own adapters use it, in processes that have none.
"""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeGuard

from trainsync.weights.transports.base import KeepsWeights, LoadsWeights, Weights, WeightSource


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Whether a call of ``function`` gives a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object that is callable
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def refuse_asynchronous(engine: Any) -> None:
    """Refuse an engine with coroutine methods, which would not be awaited and load nothing.

    Raises:
        TypeError: the engine's ``begin_update`` or ``load_weights`` is a coroutine function.
    """
    keeps = getattr(engine, "keep_weights", None)
    for method in (engine.begin_update, engine.load_weights, *([keeps] if keeps else [])):
        if is_asynchronous(method):
            raise _asynchronous(engine)


def refuse_awaitable(answer: object, engine: object) -> None:
    """Refuse an engine one of whose methods has returned an awaitable.

    Raises:
        TypeError: it is to be awaited.
    """
    if inspect.isawaitable(answer):
        if isinstance(answer, Coroutine):
            answer.close()
        raise _asynchronous(engine)


def _asynchronous(engine: object) -> TypeError:
    return TypeError(
        f"{type(engine).__name__} takes weights asynchronously, and this call awaits nothing; "
        "expected AsyncExplorerClient.update"
    )


def keeps(engine: LoadsWeights, weights: Weights) -> TypeGuard[KeepsWeights]:
    """Whether the engine can compute with the very memory of ``weights``, and may."""
    return weights.keepable and isinstance(engine, KeepsWeights) and engine.keeps_weights


def give(source: WeightSource, engine: LoadsWeights, weights: Weights) -> None:
    """Let the engine copy what ``source`` has fetched, or keep it, where it can and that may be."""
    if not keeps(engine, weights):
        refuse_awaitable(engine.load_weights(weights.state_dict.items()), engine)
        return
    refuse_awaitable(engine.keep_weights(weights.state_dict.items()), engine)
    source.keep()
