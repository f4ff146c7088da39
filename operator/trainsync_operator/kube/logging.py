"""The operator's logs: each line of a reconcile names its run, attempt and number."""

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from trainsync.kube import logging as json_logs

_QUIET: Final = ("aiohttp.access",)
_PROCESS: Final = secrets.token_hex(2)
_NUMBERS: Final = itertools.count(1)


@dataclass
class _Reconcile:
    namespace: str
    name: str
    number: str
    attempt: int | None = None


_NOW: Final[ContextVar[_Reconcile | None]] = ContextVar("reconcile", default=None)


@contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Context of one reconcile, in which log lines carry the run's name and a number."""
    token = _NOW.set(_Reconcile(namespace, name, f"{_PROCESS}-{next(_NUMBERS)}"))
    try:
        yield
    finally:
        _NOW.reset(token)


def of_attempt(attempt: int) -> None:
    """From now on, lines of this reconcile carry the attempt that it is about."""
    now = _NOW.get()
    if now is not None:
        now.attempt = attempt


def subject() -> tuple[str, str] | None:
    """Namespace and name of the run in reconcile."""
    now = _NOW.get()
    return None if now is None else (now.namespace, now.name)


def fields() -> dict[str, object]:
    """The reconcile's number, unique among all processes' lines, and its attempt once known."""
    now = _NOW.get()
    if now is None:
        return {}
    known = {} if now.attempt is None else {"attempt": now.attempt}
    return {"reconcile": now.number, **known}


def configure(level: str) -> None:
    """Send all logs to standard error as JSON."""
    json_logs.configure(level, subject, _QUIET, fields)
