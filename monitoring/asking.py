"""A dashboard's queries, as Grafana would send them. Pure."""

import re
from collections.abc import Mapping
from typing import Any


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
