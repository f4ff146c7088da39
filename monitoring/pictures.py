"""Pictures of dashboards for the docs: drawn from a dashboard's JSON and a Prometheus.

This is not Grafana: it shows the same panels, queries, units and layout in a plainer dress.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from monitoring import grafana
from monitoring.prometheus import Series, Server

_WIDTH: Final = 1280  # pixels of 24 columns
_ROW: Final = 28  # pixels of one unit of height
_DPI: Final = 100
_POINTS: Final = 240
_INK, _FAINT, _PAPER, _CARD = "#1f2328", "#6e7781", "#f4f5f7", "#ffffff"
_NAMED: Final = {
    "green": "#2e7d32",
    "yellow": "#b26a00",
    "red": "#c62828",
    "blue": "#1f60c4",
    "text": _INK,
    "transparent": _CARD,
}
_CYCLE: Final = (
    "#3274d9", "#e0752d", "#37872d", "#8f3bb8", "#c4162a", "#0f9b9b", "#b7791f", "#6e7781",
)  # fmt: skip
_LEGEND_SHOWN: Final = 6


def draw(
    dashboard: Mapping[str, Any],
    server: Server,
    variables: Mapping[str, str],
    span: tuple[float, float],
    path: Path,
) -> None:
    """Draw a dashboard for a span of Unix times into a PNG of at most 64 colours."""
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"]) * _ROW + 44
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER)
        shown = "   ".join(f"{key}: {value}" for key, value in variables.items())
        top = 1 - 24 / height
        figure.text(0.012, top, dashboard["title"], size=13, color=_INK, weight="bold")
        figure.text(0.988, top, shown, size=9, color=_FAINT, ha="right")
        marks = _marks(dashboard, server, variables, span)
        for panel in dashboard["panels"]:
            _Panel(figure, height, panel, server, variables, span, marks).draw()
        figure.savefig(path, dpi=_DPI, facecolor=_PAPER)
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


class _Panel:
    """One panel on the figure."""

    def __init__(
        self,
        figure: Figure,
        height: int,
        panel: dict[str, Any],
        server: Server,
        variables: Mapping[str, str],
        span: tuple[float, float],
        marks: Sequence[tuple[float, str]],
    ) -> None:
        self._marks = marks
        self._figure = figure
        self._panel = panel
        self._server = server
        self._variables = variables
        self._span = span
        place = panel["gridPos"]
        self._left = place["x"] / 24 + 0.005
        self._width = place["w"] / 24 - 0.006
        self._height = (place["h"] * _ROW - 6) / height
        self._bottom = 1 - (44 + (place["y"] + place["h"]) * _ROW) / height + 3 / height
        self._pixel = 1 / height
        self._defaults: dict[str, Any] = panel.get("fieldConfig", {}).get("defaults", {})

    def draw(self) -> None:
        """Query and draw."""
        if self._panel["type"] == "row":
            y = self._bottom + self._height / 2
            self._figure.text(
                self._left, y, self._panel["title"], size=11, color=_INK, weight="bold", va="center"
            )
            return
        card = self._figure.add_axes((self._left, self._bottom, self._width, self._height))
        card.set_facecolor(_CARD)
        card.set_xticks([])
        card.set_yticks([])
        for spine in card.spines.values():
            spine.set_color("#dfe2e6")
        self._figure.text(
            self._left + 0.006,
            self._bottom + self._height - 15 * self._pixel,
            self._panel["title"],
            size=8.5,
            color=_INK,
            weight="bold",
        )
        kinds = {
            "stat": self._number,
            "timeseries": self._lines,
            "heatmap": self._heat,
            "state-timeline": self._states,
            "table": self._table,
        }
        kinds[self._panel["type"]](card)

    def _plot(self, legend_lines: int) -> Axes:
        margin = 62 / _WIDTH
        self._legend_y = self._bottom + (6 + 13 * legend_lines) * self._pixel
        low = (20 + 13 * legend_lines) * self._pixel
        axes = self._figure.add_axes(
            (
                self._left + margin,
                self._bottom + low,
                self._width - margin - 0.008,
                self._height - low - 24 * self._pixel,
            )
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#c9cdd2")
        axes.tick_params(labelsize=7, colors=_FAINT, length=2)
        axes.grid(axis="y", color="#eceef0")
        # matplotlib's dates are untyped.
        locator = AutoDateLocator(minticks=3, maxticks=6)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        dates = ConciseDateFormatter(locator, show_offset=False)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(dates)
        axes.set_xlim(_date(self._span[0]), _date(self._span[1]))
        for when, colour in self._marks:
            axes.axvline(_date(when), color=colour, linestyle="--", linewidth=0.9)
        return axes

    def _ask_range(self) -> list[tuple[str, Series]]:
        start, end = self._span
        step = max((end - start) / _POINTS, 1.0)
        found = []
        for target in self._panel["targets"]:
            expr = grafana.fill(target["expr"], self._variables)
            legend = target.get("legendFormat", "")
            answer = self._server.query_range(expr, start, end, step)
            found += [(grafana.name(legend, series.labels), series) for series in answer]
        return found

    def _lines(self, card: Axes) -> None:
        found = self._ask_range()
        custom = self._defaults.get("custom", {})
        rows = math.ceil(min(len(found), _LEGEND_SHOWN) / 2)
        axes = self._plot(max(rows, 1))
        bars = custom.get("drawStyle") == "bars"
        stacked = custom.get("stacking", {}).get("mode") == "normal"
        steps = custom.get("lineInterpolation") == "stepAfter"
        if stacked and found:
            self._stack(axes, found)
        for index, (name, series) in enumerate(found if not stacked else []):
            times, values = _broken(series.points, self._span)
            colour = self._colour_of(name, index)
            if bars:
                axes.fill_between(times, 0, values, step="post", alpha=0.3, color=colour)
            style = "steps-post" if steps or bars else "default"
            axes.plot(times, values, label=name, drawstyle=style, color=colour, linewidth=1.3)
        low, high = axes.get_ylim()
        low = self._defaults.get("min", low)
        axes.set_ylim(low, max(self._defaults.get("max", high * 1.02), low + 1e-9))
        unit = self._defaults.get("unit", "none")
        whole = all(
            value == int(value) for _, s in found for _, value in s.points if value == value
        )
        if whole and unit == "none":
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.05))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=whole and unit == "none"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: grafana.text_of(value, unit)))
        handles, names = axes.get_legend_handles_labels()
        more = len(names) - _LEGEND_SHOWN
        if more > 0:
            names[_LEGEND_SHOWN - 1] += f"  (+{more})"
        if names:
            axes.legend(
                handles[:_LEGEND_SHOWN],
                names[:_LEGEND_SHOWN],
                loc="upper left",
                bbox_to_anchor=(self._left + 0.002, self._legend_y),
                bbox_transform=self._figure.transFigure,
                ncols=2,
                frameon=False,
                fontsize=7,
                labelcolor=_INK,
                handlelength=1.2,
                borderpad=0,
                labelspacing=0.3,
            )
        else:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=_FAINT)

    def _colour_of(self, name: str, index: int) -> str:
        for override in self._panel["fieldConfig"].get("overrides", []):
            if override["matcher"]["options"] == name:
                for entry in override["properties"]:
                    if entry["id"] == "color":
                        fixed = str(entry["value"]["fixedColor"])
                        return _NAMED.get(fixed, fixed)
        return _CYCLE[index % len(_CYCLE)]

    def _stack(self, axes: Axes, found: Sequence[tuple[str, Series]]) -> None:
        times = sorted({when for _, series in found for when, _ in series.points})
        values = [[dict(series.points).get(when, 0.0) for when in times] for _, series in found]
        axes.stackplot(
            [_date(when) for when in times],
            values,
            labels=[name for name, _ in found],
            colors=[self._colour_of(name, index) for index, (name, _) in enumerate(found)],
            step="post",
            alpha=0.8,
        )

    def _number(self, card: Axes) -> None:
        target = self._panel["targets"][0]
        found = self._server.query(grafana.fill(target["expr"], self._variables), self._span[1])
        unit = self._defaults.get("unit", "none")
        colour, text = _INK, self._defaults.get("noValue", "–")
        if found:
            value = found[0].points[-1][1]
            text = grafana.text_of(value, unit, self._defaults.get("decimals"))
            if self._panel["options"].get("textMode") == "name":
                text = grafana.name(target.get("legendFormat", ""), found[0].labels)
            colour = _colour(self._defaults, value)
        size = 17 if len(text) < 9 else 12
        card.text(0.5, 0.42, text, transform=card.transAxes, ha="center", va="center",
                  size=size, color=colour, weight="bold")  # fmt: skip

    def _heat(self, card: Axes) -> None:
        found = [(series.labels.get("le", ""), series) for _, series in self._ask_range()]
        found.sort(key=lambda item: float(item[0].replace("+Inf", "inf")))
        axes = self._plot(0)
        axes.grid(visible=False)
        if not found:
            return
        times = [when for when, _ in found[0][1].points]
        before = [0.0] * len(times)
        rows = []
        for _, series in found:
            values = [dict(series.points).get(when, 0.0) for when in times]
            rows.append([max(now - then, 0) for now, then in zip(values, before, strict=True)])
            before = values
        axes.pcolormesh(
            [_date(when) for when in times], range(len(rows)), rows, cmap="Blues", shading="nearest"
        )
        axes.set_yticks(
            range(0, len(rows), 2), [f"≤ {found[i][0]} s" for i in range(0, len(rows), 2)]
        )
        axes.tick_params(labelsize=6)

    def _states(self, card: Axes) -> None:
        found = self._ask_range()
        axes = self._plot(0)
        axes.grid(visible=False)
        for index, (_, series) in enumerate(found):
            step = series.points[1][0] - series.points[0][0] if len(series.points) > 1 else 1.0
            spans = [
                (_date(when), _date(when + step) - _date(when))
                for when, value in series.points
                if value == 1
            ]
            axes.broken_barh(spans, (index - 0.4, 0.8), color="#37872d", linewidth=0)
        axes.set_yticks(range(len(found)), [name for name, _ in found])
        axes.set_ylim(-0.6, len(found) - 0.4)

    def _table(self, card: Axes) -> None:
        rows: dict[tuple[str, str], dict[str, str]] = {}
        rename = next(
            t["options"]["renameByName"]
            for t in self._panel["transformations"]
            if t["id"] == "organize"
        )
        units = {
            o["matcher"]["options"]: {p["id"]: p.get("value") for p in o["properties"]}
            for o in self._panel["fieldConfig"]["overrides"]
        }
        titles = ["namespace", "run", "phase", "attempt"]
        for target in self._panel["targets"]:
            title = rename[f"Value #{target['refId']}"]
            if title not in ("Info",):
                titles.append(title)
            expr = grafana.fill(target["expr"], self._variables)
            for series in self._server.query(expr, self._span[1]):
                row = rows.setdefault((series.labels["namespace"], series.labels["run"]), {})
                row.update({k: v for k, v in series.labels.items() if k != "__name__"})
                config = units[title]
                row[title] = grafana.text_of(
                    series.points[-1][1], str(config.get("unit")), config.get("decimals")
                )
        for column, title in enumerate(titles):
            x = 0.01 + column / len(titles) * 0.985
            card.text(x, 0.86, title, size=7.5, color=_FAINT, transform=card.transAxes, va="top")
            for line, row in enumerate(sorted(rows.values(), key=lambda r: r.get("run", ""))):
                colour = "#1f60c4" if title == "run" else _INK
                card.text(x, 0.76 - line * 0.09, row.get(title, ""), size=8, color=colour,
                          transform=card.transAxes, va="top")  # fmt: skip


def _marks(
    dashboard: Mapping[str, Any],
    server: Server,
    variables: Mapping[str, str],
    span: tuple[float, float],
) -> list[tuple[float, str]]:
    """The start time and colour of each annotation."""
    step = max((span[1] - span[0]) / _POINTS, 1.0)
    marks = []
    for entry in dashboard["annotations"].get("list", []):
        for series in server.query_range(grafana.fill(entry["expr"], variables), *span, step):
            before = -math.inf
            for when, _ in series.points:
                if when - before > 1.5 * step:
                    marks.append((when, _NAMED.get(entry["iconColor"], entry["iconColor"])))
                before = when
    return marks


def _colour(defaults: Mapping[str, Any], value: float) -> str:
    colour = "text"
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return _NAMED.get(colour, colour)


def _date(when: float) -> float:
    return float(date2num(_time(when)))  # type: ignore[no-untyped-call]


def _time(when: float) -> Any:
    """A Unix time as a datetime in UTC, for matplotlib."""
    return np.datetime64(round(when * 1000), "ms")


def _broken(
    points: Sequence[tuple[float, float]], span: tuple[float, float]
) -> tuple[list[float], list[float]]:
    """Times and values with a gap where there is no value."""
    step = max((span[1] - span[0]) / _POINTS, 1.0)
    times: list[float] = []
    values: list[float] = []
    last = -math.inf
    for when, value in points:
        if last + 1.5 * step < when:
            times.append(_date(when - step))
            values.append(math.nan)
        times.append(_date(when))
        values.append(value)
        last = when
    return times, values


def main() -> None:
    """Draw one dashboard from a running Prometheus."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dashboard", type=Path, help="JSON of the dashboard")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--url", required=True, help="of the Prometheus")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE")
    options = parser.parse_args()
    variables = dict(word.split("=", 1) for word in options.set)
    now = time.time()
    draw(
        json.loads(options.dashboard.read_text()),
        Server(options.url),
        variables,
        (now - options.minutes * 60, now),
        options.picture,
    )


if __name__ == "__main__":
    main()
