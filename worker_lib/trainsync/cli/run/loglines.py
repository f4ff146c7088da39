"""Lines of logs as people read them. Pure."""

import json
from typing import Any

from trainsync.api import names
from trainsync.cli.output.text import log_line


def plain(line: str) -> str:
    """A line of a program that writes for people."""
    return log_line(line)


def structured(line: str) -> str:
    """A line of the operator's or a monitor's JSON log: time, level, message, exception."""
    entry = parse(line)
    if entry is None:
        return log_line(line)
    text = f"{entry.get('time', '')} {entry.get('level', '')!s:8} {entry.get('message', '')}"
    exception = entry.get("exception")
    lines = [text, *str(exception).splitlines()] if exception else [text]
    return "\n".join(log_line(each) for each in lines)


def about(line: str, namespace: str, run: str) -> bool:
    """Whether a line of the operator's log names this run as its object."""
    entry = parse(line)
    found = entry.get("object") if entry is not None else None
    return found == {"kind": names.KIND, "namespace": namespace, "name": run}


def parse(line: str) -> dict[str, Any] | None:
    """The JSON object of a line, None when it is none."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
