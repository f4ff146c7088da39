"""Calls of the Synchronizer as JSON: what explorers of another Ray cluster may call, and how.

Only methods whose arguments and answers are plain data: batches, and weights in Ray's object store,
do not leave their cluster.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import JsonValue, TypeAdapter, ValidationError

from trainsync.api.protocol import CallError
from trainsync.weights import errors
from trainsync.weights.counts import TransferKind
from trainsync.weights.errors import WeightsError
from trainsync.weights.synchronizer.followed_state import Contact
from trainsync.weights.synchronizer.roster import Serving
from trainsync.weights.transports.broadcast.link import TrainerEndpoint
from trainsync.weights.versions import Published

_LONGEST_MESSAGE: Final = 4096
# By method: types of the arguments, those at the end may be left out, and of the answer.
_METHODS: Final[Mapping[str, tuple[tuple[Any, ...], Any]]] = {
    "get_contact": ((), Contact),
    "register_explorer": ((str, str, bool, Serving | None), int),
    "renew": ((str, str, Serving | None, bool), None),
    "leave": ((str, str | None), None),
    "wait_new_model_state_dict": ((int, float, str | None, str, int), int | None),
    "get_model_state_dict": ((), Published),
    "acknowledge": ((str, str, int, str, Mapping[TransferKind, int] | None, int), None),
    "refuse": ((str, str, int, str, bool), None),
    "get_weight_sync_group": ((), TrainerEndpoint | None),
}
_ARGUMENTS: Final = {
    method: [TypeAdapter(kind) for kind in kinds] for method, (kinds, _) in _METHODS.items()
}
_ANSWERS: Final = {method: TypeAdapter(answer) for method, (_, answer) in _METHODS.items()}
_ERRORS: Final[Mapping[str, type[Exception]]] = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, WeightsError)
} | {"ValueError": ValueError}


def encode_arguments(method: str, arguments: Sequence[Any]) -> list[JsonValue]:
    """The arguments of a call.

    Raises:
        WeightsError: the method is not for explorers of another cluster, or has fewer arguments.
    """
    adapters = _adapters(method, len(arguments))
    pairs = zip(adapters, arguments, strict=False)
    return [adapter.dump_python(value, mode="json") for adapter, value in pairs]


def decode_arguments(method: str, arguments: Sequence[JsonValue]) -> list[Any]:
    """The inverse of `encode_arguments`.

    Raises:
        WeightsError: as there, or they are not what the method takes.
    """
    adapters = _adapters(method, len(arguments))
    try:
        pairs = zip(adapters, arguments, strict=False)
        return [adapter.validate_python(value) for adapter, value in pairs]
    except ValidationError as error:
        raise WeightsError(f"{method} is called with other arguments: {error}") from error


def encode_answer(method: str, answer: Any) -> JsonValue:
    """The answer of ``method``."""
    encoded: JsonValue = _ANSWERS[method].dump_python(answer, mode="json")
    return encoded


def decode_answer(method: str, answer: JsonValue) -> Any:
    """The inverse of `encode_answer`.

    Raises:
        WeightsError: it is no answer of ``method``.
    """
    try:
        return _ANSWERS[method].validate_python(answer)
    except ValidationError as error:
        raise WeightsError(f"the Synchronizer answers {method} with something else") from error


def encode_error(error: BaseException) -> CallError:
    """The error that a method raised."""
    kind = type(error).__name__
    message = str(error) or kind
    if kind not in _ERRORS:
        kind, message = WeightsError.__name__, f"{kind}: {message}"
    # A name that is no UTF-8, such as of a file, cannot travel.
    message = message.encode("utf-8", "replace").decode()
    return CallError(kind=kind, message=message[:_LONGEST_MESSAGE])


def decode_error(error: CallError) -> Exception:
    """The inverse of `encode_error`; a class that is not known here is its base."""
    return _ERRORS.get(error.kind, WeightsError)(error.message)


def _adapters(method: str, count: int) -> list[TypeAdapter[Any]]:
    adapters = _ARGUMENTS.get(method)
    if adapters is None or count > len(adapters):
        raise WeightsError(
            f"{method} with {count} arguments is not for explorers of another Ray cluster"
        )
    return adapters
