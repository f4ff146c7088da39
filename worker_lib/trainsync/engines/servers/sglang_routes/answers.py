"""What SGLang says of a change of its weights."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import KEPT, ServerError

# What SGLang answers before it has written to its weights.
_NOT_BEGUN: Final = ("Failed to get weights iterator", "Failed to get model loader")


def succeed(calls: ServerCalls, path: str, deadline: float, body: Mapping[str, Any]) -> None:
    """Make a call that must succeed.

    Raises:
        ServerError: it did not.
    """
    status, said = calls.raw("POST", path, deadline, body)
    if (problem := problem_in(status, said)) is not None:
        raise ServerError(f"{calls.name}{path}: {problem}")


def problem_in(status: int, said: bytes) -> str | None:
    """Why SGLang did not do it, with `KEPT` if its weights are as they were; None: it did."""
    try:
        answer = json.loads(said)
        succeeded, message = answer["success"], str(answer["message"])
    except (ValueError, TypeError, KeyError):
        return f"{status}: {said[:1000]!r}"
    if succeeded is True and status == HTTPStatus.OK:
        return None
    # Replicas answer one after the other, and each of them must have kept its weights.
    kept = all(part.startswith(_NOT_BEGUN) for part in message.split(" | "))
    return f"{KEPT}: {message}" if kept else message
