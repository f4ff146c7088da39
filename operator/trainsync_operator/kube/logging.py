"""Logs as one JSON object a line, each with the run that it is about."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

_SUBJECT: Final[ContextVar[tuple[str, str] | None]] = ContextVar("subject", default=None)


@contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Lines logged inside are about this run."""
    token = _SUBJECT.set((namespace, name))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, and the run as ``object``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        subject = _SUBJECT.get()
        if subject:
            entry["object"] = {"kind": "TrainingRun", "namespace": subject[0], "name": subject[1]}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(level: str) -> None:
    """Send all logs to standard error as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # One line for each watched event says nothing that ours do not.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
