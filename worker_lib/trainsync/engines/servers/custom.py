"""Drivers of other servers than vLLM and SGLang, which the user's own code makes."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, cast

from trainsync.engines.servers.base import OwnedDriver, PauseMode

_CALLS: Final = ("close", "tag", "version", "is_paused", "is_alive", "update", "logprobs")


class DriverError(Exception):
    """The user's function cannot be had, or makes no driver."""


class MakesDriver(Protocol):
    """The function of ``--driver``."""

    def __call__(self, url: str, *, timeout: float, pause: PauseMode, memory: Path) -> OwnedDriver:
        """A driver of the server at ``url``; the agent makes several, each for one thread.

        It asks the server nothing yet: in a pod the agent begins before the server.

        Args:
            timeout: seconds for an update, and for every other call.
            memory: the memory file system in which versions are staged; read them by
                `trainsync.weights.staging.reading.StagedReader`.
        """
        ...


def load_driver(name: str) -> MakesDriver:
    """The function ``package.module:function``.

    Raises:
        DriverError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # of the user's module, which may raise anything
        raise DriverError(f"driver {name} cannot be imported: {error!r}") from error

    def make(url: str, *, timeout: float, pause: PauseMode, memory: Path) -> OwnedDriver:
        try:
            made = found(url, timeout=timeout, pause=pause, memory=memory)
        except Exception as error:  # of the user's function
            raise DriverError(f"driver {name} cannot be made: {error!r}") from error
        lacks = [call for call in _CALLS if not callable(getattr(made, call, None))]
        if lacks:
            what = type(made).__name__
            raise DriverError(f"driver {name} made a {what}, which lacks {', '.join(lacks)}")
        return cast(OwnedDriver, made)

    return make
