"""Parts shared by all dashboards: variables, links, annotations, and their JSON. Pure."""

import json
from collections.abc import Sequence
from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from monitoring.panels import DATASOURCE, Part

TAG: Final = "trainsync"
FLEET, RUN, OPERATOR = "trainsync-fleet", "trainsync-run", "trainsync-operator"
RUN_URL: Final = (
    f"/d/{RUN}?${{datasource:queryparam}}&${{__url_time_range}}"
    "&var-namespace=${__data.fields.namespace}&var-run=${__data.fields.run}"
)


def board(uid: str, title: str, description: str, *, since: str) -> dashboard.Dashboard:
    """An empty dashboard with its data source and the links to the others."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time(since, "now")
        .timezone("browser")
        .refresh("30s")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
    )
    # Links by tag, as a bar: other dashboards with the tag appear too.
    return made.link(
        dashboard.DashboardLink("trainsync")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )


def add(made: dashboard.Dashboard, parts: Sequence[Part]) -> None:
    """Put rows and panels on a dashboard, from left to right and from top to bottom."""
    for part in parts:
        if isinstance(part, dashboard.Row):
            made.with_row(part)
        else:
            made.with_panel(part)


def label_variable(
    name: str, label: str, query: str, *, many: bool = False
) -> dashboard.QueryVariable:
    """A variable with the values of a label; with ``many``, several or all can be chosen."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": "variable"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    if many:
        everything = models.VariableOption(selected=True, text="All", value="$__all")
        variable = variable.multi(True).include_all(True).current(everything)
    return variable


def annotation(name: str, expr: str, colour: str) -> dashboard.AnnotationQuery:
    """Marks on all panels at times when the query has a value."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expr)
    )


def render(made: dashboard.Dashboard, titles: Sequence[tuple[str, str]] = ()) -> str:
    """The JSON to import; ``titles`` are the texts of the annotations in order."""
    text = json.dumps(made.build(), cls=JSONEncoder)
    found: dict[str, Any] = json.loads(text)
    own = found.get("annotations", {}).get("list", [])
    # The SDK lacks these two fields of the Prometheus data source.
    for entry, (title, details) in zip(own, titles, strict=True):
        entry["titleFormat"], entry["textFormat"] = title, details
        entry["step"] = "60s"
    return json.dumps(found, indent=1, sort_keys=True) + "\n"
