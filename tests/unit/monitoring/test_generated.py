"""The generated files are complete and equal to the code's output."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.metrics import MetricType
from trainsync.monitor.server.metrics_catalogue import CATALOGUE as MONITOR
from trainsync.monitor.server.metrics_catalogue import RUN_LABELS
from trainsync_operator.metrics.catalogue import CATALOGUE as OPERATOR

from monitoring.generated import CHART, REPOSITORY, files
from monitoring.rules import RECORDED, RUNBOOKS, Pace, alerts, groups

RUNBOOK_PAGES = REPOSITORY / "docs" / "runbooks"
DASHBOARDS = sorted(path for path in files() if path.suffix == ".json")
# Made by Prometheus itself of the alerts.
ALERTS = "ALERTS"


def parse(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files()[path])
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in parse(path)["panels"] if panel["type"] != "row"]


def expressions(path: Path) -> list[str]:
    found = parse(path)
    queries = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    annotations = [entry["expr"] for entry in found["annotations"].get("list", [])]
    variables = [
        entry["query"]["query"] for entry in found["templating"]["list"] if entry["type"] == "query"
    ]
    return queries + annotations + variables


def rule_expressions() -> list[str]:
    return [rule["expr"] for group in groups(Pace())["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:[a-z_]+:)?trainsync_\w+(?::\w+)?", expression))


def exposed() -> dict[str, set[str]]:
    """Series names with their labels."""
    found: dict[str, set[str]] = {name: {"namespace", "run"} for name in RECORDED.values()}
    for metric in MONITOR + OPERATOR:
        labels = {*metric.label_names}
        if metric in MONITOR:
            labels |= {label.name for label in RUN_LABELS}
        if metric.type is MetricType.HISTOGRAM:
            for suffix in ("_bucket", "_sum", "_count"):
                found[metric.name + suffix] = labels | {"le"}
        else:
            found[metric.name] = labels
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_the_committed_file_is_what_the_code_makes(path: Path) -> None:
    assert path.read_text() == files()[path], "run `make dashboards` and commit what it writes"


def test_every_dashboard_and_rule_of_the_chart_is_generated() -> None:
    lying = {path for name in ("dashboards", "rules") for path in (CHART / name).iterdir()}
    assert lying == {path for path in files() if CHART in path.parents}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_queries_name_metrics_and_labels_that_are_exposed(path: Path) -> None:
    known = exposed()
    for expression in [*expressions(path), *rule_expressions()]:
        names = names_in(expression)
        assert names or ALERTS in expression, expression
        assert names <= set(known), (expression, names - set(known))
        for name, matchers in re.findall(r"([\w:]+)\{([^{}]*)\}", expression):
            if name != ALERTS:
                used = set(re.findall(r"(\w+)=~?", matchers))
                assert used <= known[name], (expression, name, used - known[name])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_panel_says_what_it_shows_in_which_unit(path: Path) -> None:
    titles = [panel["title"] for panel in panels(path)]
    assert len(titles) == len(set(titles))
    for panel in panels(path):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        if panel["type"] in ("timeseries", "stat"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] == "timeseries":
            assert all(target.get("legendFormat") for target in panel["targets"]), panel["title"]


def test_a_table_has_one_row_for_each_run() -> None:
    # Grafana merges rows whose labels are all the same, and __name__ is one of them.
    tables = [panel for path in DASHBOARDS for panel in panels(path) if panel["type"] == "table"]
    assert tables
    for panel in tables:
        for target in panel["targets"]:
            assert re.match(r"max by \(namespace, run[,)]", target["expr"]), target["expr"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_lie_on_the_grid_and_not_on_each_other(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in parse(path)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells), panel["title"]
        taken |= cells


def test_dashboards_can_be_told_apart_and_are_linked() -> None:
    found = [parse(path) for path in DASHBOARDS]
    assert len({entry["uid"] for entry in found}) == len(found) == 3
    for entry in found:
        assert entry["links"][0]["tags"] == entry["tags"] == ["trainsync"]


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    linked = {alert.runbook for alert in alerts(Pace())}
    pages = {path.stem: path for path in RUNBOOK_PAGES.glob("*.md")}
    pages.pop("index", None)
    assert linked == set(pages)
    for alert in alerts(Pace()):
        page = pages[alert.runbook].read_text()
        assert alert.name in page
        for heading in ("## Meaning", "## Look", "## Mend"):
            assert heading in page, (alert.runbook, heading)
        assert alert.to_dict(Pace())["annotations"]["runbook_url"].startswith(RUNBOOKS)


def test_runbooks_name_metrics_that_exist() -> None:
    known = exposed()
    for page in RUNBOOK_PAGES.glob("*.md"):
        for name in re.findall(
            r"\btrainsync_(?:run|checkpoint|weights|operator|monitor|volume)_\w+", page.read_text()
        ):
            assert name in known, (page.name, name)


@pytest.mark.parametrize(
    ("seconds", "speed", "text"),
    [
        (3600, 1, "1h"),
        (300, 1, "5m"),
        (90, 1, "90s"),
        (300, 100, "3s"),
        (60, 100, "600ms"),
        (0, 1, "0s"),
    ],
)
def test_a_pace_scales_durations(seconds: float, speed: float, text: str) -> None:
    assert Pace(speed).window(seconds) == text
