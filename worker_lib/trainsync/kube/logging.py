"""Logs as one JSON object a line, each with the run that it is about."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, exception, and the run as ``object``.

    Args:
        subject: namespace and name of the run that is worked on now, None for no run.
        fields: what else each line has now.
    """

    def __init__(
        self,
        subject: Callable[[], tuple[str, str] | None],
        fields: Callable[[], dict[str, object]] = dict,
    ) -> None:
        super().__init__()
        self._subject = subject
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        subject = self._subject()
        if subject:
            entry["object"] = {"kind": "TrainingRun", "namespace": subject[0], "name": subject[1]}
        entry.update(self._fields())
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(
    level: str,
    subject: Callable[[], tuple[str, str] | None],
    quiet: tuple[str, ...],
    fields: Callable[[], dict[str, object]] = dict,
) -> None:
    """Send all logs to standard error as JSON; loggers in ``quiet`` from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(subject, fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
