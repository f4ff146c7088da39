"""Ray's errors in one sentence: their own texts have many lines, and colours of a terminal."""

import re
from typing import Final

import ray

from trainsync.weights.errors import WeightsError

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE: Final = "The actor is dead because"
_MOST: Final = 400  # characters


def one_sentence(error: BaseException) -> str:
    """The first sentence of its text, or of the cause that Ray gives for an actor's death."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = next((line for line in lines if line.startswith(_CAUSE)), lines[0])
    return said.split(". ")[0].rstrip(".")[:_MOST]


def raised_there(error: ray.exceptions.RayTaskError) -> Exception:
    """The error that the called method raised, without the text that Ray adds to it.

    An error that is neither of this package nor a refused argument gets Ray's as its cause, which
    says where it was raised.
    """
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    if not isinstance(cause, WeightsError | ValueError):
        cause.__cause__ = error
    return cause
