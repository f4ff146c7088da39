"""The operator's logs: each line names the run that is reconciled."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from trainsync.kube import logging as json_logs

_SUBJECT: Final[ContextVar[tuple[str, str] | None]] = ContextVar("subject", default=None)
# kopf logs a line for each watched event, which repeats the operator's own lines.
_QUIET: Final = ("kopf", "aiohttp.access")
# It warns that a thread takes no signals.
_SILENT: Final = "kopf._core.reactor.running"


@contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Context in which log lines carry this run's name."""
    token = _SUBJECT.set((namespace, name))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


def subject() -> tuple[str, str] | None:
    """Namespace and name of the run in reconcile."""
    return _SUBJECT.get()


def configure(level: str) -> None:
    """Send all logs to standard error as JSON."""
    json_logs.configure(level, subject, _QUIET)
    logging.getLogger(_SILENT).setLevel(logging.ERROR)
