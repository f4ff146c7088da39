"""The operator's logs: each line names the run that is reconciled."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from trainsync.kube import logging as json_logs

_SUBJECT: Final[ContextVar[tuple[str, str] | None]] = ContextVar("subject", default=None)
# kopf logs a line for each watched event, which says nothing that our lines do not.
_QUIET: Final = ("kopf", "aiohttp.access")
# It warns that a thread takes no signals.
_SILENT: Final = "kopf._core.reactor.running"


@contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Lines logged inside are about this run."""
    token = _SUBJECT.set((namespace, name))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


def subject() -> tuple[str, str] | None:
    """Namespace and name of the run that is reconciled now."""
    return _SUBJECT.get()


def configure(level: str) -> None:
    """Send all logs to standard error as JSON."""
    json_logs.configure(level, subject, _QUIET)
    logging.getLogger(_SILENT).setLevel(logging.ERROR)
