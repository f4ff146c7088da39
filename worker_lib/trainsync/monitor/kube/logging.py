"""Logs as one JSON object a line, each naming the run."""

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, exception, and the run as ``object``."""

    def __init__(self, namespace: str, run: str) -> None:
        super().__init__()
        self._object = {"kind": "TrainingRun", "namespace": namespace, "name": run}

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "object": self._object,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(level: str, namespace: str, run: str) -> None:
    """Send all logs to standard error as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(namespace, run))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # One line for each request says nothing that the metrics do not.
    for chatty in ("uvicorn.access", "aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
