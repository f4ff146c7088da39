"""Runs the queries of every dashboard panel for a run, and draws the panels."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from monitoring import grafana, pictures
from monitoring.generated import files
from monitoring.prometheus import Server

# Set this to docs/img to redraw the pictures of the docs.
KEEP = "TRAINSYNC_PICTURES"
# Series that exist only after such an event.
ONLY_IN_TROUBLE = {
    "{{kind}} aborted: {{cause}}",
    "{{kind}} lacks a late part",
    "{{kind}} part written from memory after a death",
    "checkpoint set aside",
    "copy to the mirror failed",
    "request {{reason}}",
    "volume {{doing}}",
}
# Series of runs with inference servers, or with a mirror, alone: unit tests read these metrics.
OF_SOME_RUNS = re.compile(r"\btrainsync_(servers?\b|server_|checkpoint_mirror_)")
# The save may be committed between two scrapes.
BRIEF = {"oldest, seconds"}


def dashboards() -> dict[str, dict[str, Any]]:
    """The dashboards' JSON by file name."""
    return {path.stem: json.loads(text) for path, text in files().items() if path.suffix == ".json"}


def empty(
    server: Server, dashboard: dict[str, Any], variables: dict[str, str], since: float
) -> list[str]:
    """Queries without data since a Unix time, with the panel's title."""
    now = time.time()
    found = []
    for panel in grafana.panels(dashboard):
        for target in panel["targets"]:
            if target.get("legendFormat") in ONLY_IN_TROUBLE | BRIEF:
                continue
            if OF_SOME_RUNS.search(target["expr"]):
                continue
            expr = grafana.fill(target["expr"], variables)
            series = server.query_range(expr, since, now, max((now - since) / 300, 1.0))
            if not any(series.points for series in series):
                found.append(f"{panel['title']}: {expr}")
    return found


def draw_all(
    server: Server, variables: dict[str, str], since: float, directory: Path
) -> list[Path]:
    """Draw each dashboard since a Unix time."""
    directory = Path(os.environ.get(KEEP) or directory)
    paths = []
    for name, dashboard in dashboards().items():
        paths.append(directory / f"dashboard-{name}.png")
        used = {
            key: variables[key]
            for key in ("namespace", "run")
            if any(entry["name"] == key for entry in dashboard["templating"]["list"])
        }
        pictures.draw(dashboard, server, used, (since, time.time()), paths[-1])
    return paths
