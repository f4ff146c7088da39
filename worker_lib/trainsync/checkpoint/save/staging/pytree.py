"""Walk a nested state: containers are copied, tensors go through a function, the rest is checked.

What comes out holds nothing of the caller's that can change, and only types that
``torch.load(weights_only=True)`` reads back: better a refusal at the save than at the resume.
"""

import copy
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainsync.checkpoint.errors import UnsupportedStateError

logger = logging.getLogger(__name__)

_MANY: Final = 50_000  # Python objects of a state, which cost time one by one
_SLOW_SECONDS: Final = 0.2  # of copying a state apart from its tensors; then they are counted
_warned: Final[set[str]] = set()  # places in states; saves go on for days

_PLAIN: frozenset[type] = frozenset(
    {
        type(None),
        bool,
        float,
        complex,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
    }
)
_PLAIN_OR_INT = _PLAIN | {int}
# The unpickler of weights_only reads integers of at most 255 bytes.
_MAX_INT_BITS = 8 * 255 - 1


@dataclass(frozen=True, slots=True)
class _Attribute:
    name: str


Path = tuple[Any, ...]
"""The way to a part: that of what holds it, and its key. A text would take as long as the rest."""


def path_text(path: Path) -> str:
    """The path, as an error shows it."""
    if not path:
        return "state"
    holder, key = path
    step = f".{key.name}" if isinstance(key, _Attribute) else f"[{key!r}]"
    return path_text(holder) + step


def map_tensors(value: Any, tensor_fn: Callable[[torch.Tensor, Path], torch.Tensor]) -> Any:
    """Copy ``value``, with every tensor replaced by ``tensor_fn(tensor, path)``.

    Args:
        value: dicts, OrderedDicts (their attributes too: torch keeps module versions there),
            lists, tuples and sets, nested at will, of tensors, plain Python values and objects of
            classes given to ``torch.serialization.add_safe_globals``.
        tensor_fn: called once for every occurrence of a tensor.

    Raises:
        UnsupportedStateError: names the path and type of what could not be loaded again.
    """
    started = time.perf_counter()
    try:
        copied = _map(value, tensor_fn, ())
    except RecursionError:
        raise UnsupportedStateError(
            "the state refers to itself, or is nested thousands deep: expected dicts, lists and "
            "tuples that hold one another like a tree"
        ) from None
    if time.perf_counter() - started > _SLOW_SECONDS:
        _warn_of_many(value, ())
    return copied


def _warn_of_many(value: Any, path: Path) -> None:
    """Say, once for each place, where a state has so many Python objects that saves are slow."""
    count = _count(value)
    if count < _MANY:
        return
    while parts := {key: _count(part) for key, part in _items(value)}:
        key = max(parts, key=parts.__getitem__)
        if parts[key] < count / 2:
            break
        value, path, count = dict(_items(value))[key], (path, key), parts[key]
    text = path_text(path)
    if text not in _warned:
        _warned.add(text)
        logger.warning(
            "%s holds %d Python objects: each save holds training up for them, and torch takes far "
            "longer to load them; expected fewer than %d, or tensors made of them",
            text,
            count,
            _MANY,
        )


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _count(value: Any) -> int:
    return 1 + sum(_count(part) for _, part in _items(value))


def _map(value: Any, fn: Callable[[torch.Tensor, Path], torch.Tensor], path: Path) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value, path)
    kind = type(value)
    if kind is dict and _all_plain(value) and _all_plain(value.values()):
        return dict(value)
    if kind is dict or kind is OrderedDict:
        copied = kind((_leaf(k, path), _map(v, fn, (path, k))) for k, v in value.items())
        if kind is OrderedDict:
            for attribute, held in vars(value).items():
                setattr(copied, attribute, _map(held, fn, (path, _Attribute(attribute))))
        return copied
    if kind is list or kind is tuple:
        if _all_plain(value):
            return kind(value)
        return kind(_map(item, fn, (path, i)) for i, item in enumerate(value))
    if kind is set:
        return {_leaf(item, path) for item in value}
    if kind is Counter:
        return Counter({_leaf(k, path): _leaf(count, path) for k, count in value.items()})
    return _leaf(value, path)


def _all_plain(values: Collection[Any]) -> bool:
    """Whether each may be taken as it is; asked at once, as states have thousands of short lists,
    and random numbers 625 integers."""
    kinds = {*map(type, values)}
    if not kinds or not kinds <= _PLAIN_OR_INT:
        return False
    return int not in kinds or all(
        value.bit_length() <= _MAX_INT_BITS for value in values if type(value) is int
    )


def _leaf(value: Any, path: Path) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int and value.bit_length() <= _MAX_INT_BITS:
        return value
    if kind is tuple:  # a key of a dict
        return tuple(_leaf(item, path) for item in value)
    if kind is bytes and value:
        return value
    if kind is bytearray:
        return bytearray(value)
    if any(kind is allowed for allowed in torch.serialization.get_safe_globals()):
        return copy.deepcopy(value)
    raise UnsupportedStateError(
        f"{path_text(path)} is a {kind.__module__}.{kind.__qualname__} ({_short(value)}), which "
        "torch.load(weights_only=True) cannot read back; save a tensor or plain values instead, "
        "or allow the class with torch.serialization.add_safe_globals"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
