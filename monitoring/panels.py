"""The kinds of panels of our dashboards, built with grafana-foundation-sdk. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import (
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"
PHASES: Final = {
    "Pending": "#8e8e8e",
    "Starting": "#8ab8ff",
    "Running": "#56a64b",
    "Restarting": "#ff9830",
    "Suspending": "#ffb357",
    "Suspended": "#b877d9",
    "Complete": "#1f60c4",
    "Failed": "#e02f44",
}
"""The colour of each phase."""
Steps = Sequence[tuple[float | None, str]]
Part = (
    timeseries.Panel
    | stat.Panel
    | statetimeline.Panel
    | heatmap.Panel
    | table.Panel
    | dashboard.Row
)


@dataclass(frozen=True)
class Query:
    """One query of a panel; ``legend`` names its series by labels in double braces."""

    expr: str
    legend: str = ""


def line(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    height: int = 8,
    style: str = "line",
    stacked: bool = False,
    thresholds: Steps = (),
    minimum: float | None = 0,
    maximum: float | None = None,
    decimals: int | None = None,
    colours: Mapping[str, str] | None = None,
) -> timeseries.Panel:
    """Series over time; ``style`` is line, steps or bars, ``colours`` are by legend."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(height)
        .targets([_target(query, index) for index, query in enumerate(queries)])
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .line_width(2)
        .show_points(common.VisibilityMode.NEVER)
    )
    if style == "bars":
        panel = panel.draw_style(common.GraphDrawStyle.BARS).fill_opacity(70)
    elif style == "steps":
        panel = panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if stacked:
        panel = panel.stacking(
            common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        ).fill_opacity(40)
    for name, colour in (colours or {}).items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        panel = panel.override_by_name(name, [models.DynamicConfigValue("color", fixed)])
    if minimum is not None:
        panel = panel.min(minimum)
    if maximum is not None:
        panel = panel.max(maximum)
    if decimals is not None:
        panel = panel.decimals(decimals)
    if thresholds:
        panel = panel.thresholds(_thresholds(thresholds)).thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        )
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 3,
    height: int = 4,
    thresholds: Steps = ((None, BLUE),),
    decimals: int | None = None,
    no_value: str = "–",
    names: bool = False,
) -> stat.Panel:
    """The newest value, large; with ``names`` the legend of the series instead of its value."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(height)
        .no_value(no_value)
        .targets([_target(query, index, instant=True) for index, query in enumerate(queries)])
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .thresholds(_thresholds(thresholds))
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if names:
        panel = panel.text_mode(common.BigValueTextMode.NAME)
    return panel


def timeline(title: str, description: str, query: Query, *, width: int = 24) -> statetimeline.Panel:
    """One row for each series, coloured while its value is 1."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(6)
        .targets([_target(query, 0)])
        .mappings(
            [
                models.ValueMap(
                    {
                        "0": models.ValueMappingResult(text=" ", color="transparent"),
                        "1": models.ValueMappingResult(text="yes", color=GREEN),
                    }
                )
            ]
        )
        .show_value(common.VisibilityMode.NEVER)
    )


def heat(title: str, description: str, query: Query, *, width: int = 8) -> heatmap.Panel:
    """Buckets of a histogram over time; the query keeps ``le``."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(8)
        .targets([_target(query, 0).legend_format("{{le}}").format(PromQueryFormat.HEATMAP)])
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(32)
        )
    )


@dataclass(frozen=True)
class Column:
    """One column of a table of runs: its title, its query by namespace and run, and its unit."""

    title: str
    expr: str
    unit: str = "none"
    thresholds: Steps = ()
    decimals: int | None = None


def runs_table(
    title: str, description: str, columns: Sequence[Column], url: str, *, hidden: Sequence[str]
) -> table.Panel:
    """A row for each run, whose name links to ``url``; ``hidden`` are labels without a column."""
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(24)
        .height(10)
        .targets(
            [
                _target(Query(column.expr), index, instant=True).format(PromQueryFormat.TABLE)
                for index, column in enumerate(columns)
            ]
        )
        .with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                "organize",
                options={
                    "excludeByName": dict.fromkeys(["Time", *hidden], True),
                    "renameByName": {
                        f"Value #{_reference(index)}": column.title
                        for index, column in enumerate(columns)
                    },
                },
            )
        )
    )
    link = {"title": "Open the run", "url": url}
    panel = panel.override_by_name("run", [models.DynamicConfigValue("links", [link])])
    for column in columns:
        properties: list[Any] = [models.DynamicConfigValue("unit", column.unit)]
        if column.decimals is not None:
            properties.append(models.DynamicConfigValue("decimals", column.decimals))
        if column.thresholds:
            properties.append(
                models.DynamicConfigValue("thresholds", _thresholds(column.thresholds).build())
            )
            cell = {"type": "color-text"}
            properties.append(models.DynamicConfigValue("custom.cellOptions", cell))
        panel = panel.override_by_name(column.title, properties)
    return panel


def row(title: str) -> dashboard.Row:
    """A heading."""
    return dashboard.Row(title)


def _reference(index: int) -> str:
    return chr(ord("A") + index)


def _target(query: Query, index: int, *, instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(_reference(index))
    if query.legend:
        target = target.legend_format(query.legend)
    return target.instant() if instant else target.range()


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value, colour) for value, colour in steps])
    )
