"""Text formats of durations, times and numbers on the monitor's page and in a terminal. Pure."""

from datetime import UTC, datetime
from typing import Final

_KEPT: Final = frozenset("\n\t\u00a0")
_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """The two largest units: ``42 s``, ``3 min 10 s``, ``2 h``, ``4 d 3 h``; below 10 s a tenth.

    A negative duration, from clocks that disagree, is ``0 s``.
    """
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}".rstrip("0").rstrip(".") + " s"
    left = round(seconds)
    first = next(i for i, (_, length) in enumerate(_UNITS) if left >= length)
    said = []
    for unit, length in _UNITS[first : first + 2]:
        count, left = divmod(left, length)
        if count:
            said.append(f"{count} {unit}")
    return " ".join(said)


def ago(then: datetime, now: datetime) -> str:
    """``3 min 10 s ago``; whole seconds, the resolution of times in Kubernetes."""
    return f"{duration(max(int((now - then).total_seconds()), 0))} ago"


def clock(time: datetime) -> str:
    """``2026-01-31 14:05:09``, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def attempts(attempt: int, restarts: int, by_infrastructure: int) -> str:
    """``attempt 3, 1 restart``, and where there were such ``and 2 by the infrastructure``."""
    text = f"attempt {attempt}, {counted(restarts, 'restart')}"
    return f"{text} and {by_infrastructure:,} by the infrastructure" if by_infrastructure else text


def value(number: float) -> str:
    """A metric with at most six digits: ``0.8241``, ``12345.7``, ``1.2e-05``."""
    return f"{number:.6g}"


def clean(text: str) -> str:
    """``text`` with unprintable characters escaped, as in ``\\x1b``.

    Unprintable are control characters, which a terminal would obey, and marks of the text
    direction.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in _KEPT else char.encode("unicode_escape").decode()
        for char in text
    )
