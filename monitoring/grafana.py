"""Grafana's work on a dashboard: the queries that it sends, and how it shows values. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Any

_TIMES = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT = ("", "K", "Mil", "Bil")


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All panels with a query, in order."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def fill(expr: str, variables: Mapping[str, str]) -> str:
    """A query with the values of the dashboard's variables."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables[found[1]], expr)


def name(legend: str, labels: Mapping[str, str]) -> str:
    """The legend of a series."""
    if not legend:
        return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)


def text_of(value: float, unit: str, decimals: int | None = None) -> str:
    """A value with its unit."""
    if not math.isfinite(value):
        return str(value)
    if unit == "percentunit":
        return f"{_number(value * 100, decimals)}%"
    if unit == "s":
        for name, size in _TIMES:
            if abs(value) >= size:
                return f"{_number(value / size, decimals)} {name}"
        return "0 s"
    if unit in ("bytes", "Bps"):
        return _scaled(value, 1024, _BYTES, decimals) + ("/s" if unit == "Bps" else "")
    if unit == "short":
        return _scaled(value, 1000, _SHORT, decimals).strip()
    return _number(value, decimals) + (" /s" if unit == "reqps" else "")


def _scaled(value: float, base: int, names: tuple[str, ...], decimals: int | None) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    return f"{_number(value, decimals)} {names[power]}"


def _number(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
