"""Plotly figures as plain dicts: data, layout and a table of the same numbers for CSV.

Nothing here imports Plotly. With the palette `PAGE` the colours are names of CSS custom properties, which the
page replaces by the theme's colours; with `LIGHT` or `DARK` the dicts are complete.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cosmati.explorer.palette import MARKERS, Palette
from cosmati.explorer.wording import AXIS_NAMES, interval_text, number, quality_text, time_unit
from cosmati.records.run import TIME_PARTS
from cosmati.records.study import EvaluationPoint, StudyRecord
from cosmati.study.curves import (
    Axis,
    Curve,
    CurvePoint,
    mean_costs,
    pareto_frontier,
    position_of,
    runs_of,
    tradeoff_curve,
)

MAX_LINE_POINTS = 200
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Figure:
    """A Plotly figure, what it shows in a sentence, and its numbers as CSV text.

    Attributes:
        plot: Data and layout.
        label: What it shows.
        csv: Its numbers, empty where they have an address.
        address: Where the page fetches the plot when it's needed; empty where it comes with the page.
        csv_address: Where the numbers are fetched.
    """

    plot: dict[str, Any]
    label: str
    csv: str
    address: str = ""
    csv_address: str = ""


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet runs."""


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a CSV file. Text that a spreadsheet would run as a formula gets a leading quote."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\r\n")
    for row in (header, *rows):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])
    return stream.getvalue()


def axis_scale(study: StudyRecord, axis: Axis) -> tuple[str, float]:
    """Return the axis title with its unit, and the length of that unit."""
    if axis not in ("seconds", "cpu_seconds"):
        return AXIS_NAMES[axis], 1.0
    costs = mean_costs(study, axis)
    unit, length = time_unit(max((position_of(run, run.final, axis, costs) for run in study.runs), default=1.0))
    return f"{AXIS_NAMES[axis]} ({unit})", length


def log_ticks(low: float, high: float) -> list[float]:
    """Return round positions between `low` and `high` for a logarithmic axis, about four to eight of them."""
    if not 0 < low < high:
        return [low]
    few = (1.0, 2.0, 5.0) if high / low > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    mantissas = (1.0,) if high / low > 1e4 else few
    return [m * 10.0**decade for decade in decades for m in mantissas if low <= m * 10.0**decade <= high]


def arm_colours(study: StudyRecord, palette: Palette) -> dict[str, str]:
    """Return a colour for each arm: ink for the baseline, then the series colours in turn."""
    others = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    colours = {name: palette.series[index % len(palette.series)] for index, name in enumerate(others)}
    return {study.baseline_arm: palette.ink} | colours


def arm_markers(study: StudyRecord) -> dict[str, str]:
    """Return a marker for each arm, the baseline's a square."""
    others = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    return {study.baseline_arm: "square"} | {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(others)}


def base_layout(palette: Palette, *, height: int = 420) -> dict[str, Any]:
    """Return the layout that all figures share."""
    line = {"gridcolor": palette.rule, "linecolor": palette.rule, "zeroline": False, "automargin": True}
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": palette.surface,
        "plot_bgcolor": "rgba(0,0,0,0)",
        "dragmode": False,
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": palette.ink},
        "margin": {"l": 56, "r": 16, "t": 36, "b": 56},
        "legend": {
            "orientation": "h",
            "x": 0,
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hoverlabel": {
            "bgcolor": palette.surface,
            "bordercolor": palette.rule,
            "font": {"color": palette.ink},
        },
        "xaxis": {**line},
        "yaxis": {**line},
    }


def axis_title(text: str) -> dict[str, Any]:
    """Return an axis title as all figures have it."""
    return {"text": plotly_text(text), "font": {"size": 13}}


def log_axis(positions: Sequence[float], title: str) -> dict[str, Any]:
    """Return a logarithmic axis over positions, with a few round ticks."""
    if not positions:
        return {"title": axis_title(title)}
    ticks = log_ticks(min(positions) * 0.9, max(positions) * 1.1)
    return {
        "type": "log",
        "title": axis_title(title),
        "tickvals": ticks,
        "ticktext": [f"{tick:.3g}" if tick < 1e6 else f"{tick:.0e}" for tick in ticks],
        "range": [math.log10(min(positions) * 0.88), math.log10(max(positions) * 1.14)],
    }


def tradeoff_figure(study: StudyRecord, palette: Palette, *, axis: Axis = "seconds") -> Figure:
    """Draw quality against `axis` with 95 % intervals: a line an arm, the Pareto frontier and a quality line.

    `layout.shapes[0]` is the quality line, at the baseline's best.
    """
    title, unit = axis_scale(study, axis)
    colours, markers, rows, traces = arm_colours(study, palette), arm_markers(study), [], []
    positions: list[float] = []
    for arm in study.arms:
        curve, is_base = tradeoff_curve(study, arm.name, axis=axis), arm.name == study.baseline_arm
        points = curve.points
        if points:
            traces.append(_curve_trace(curve, colours[arm.name], 4 if is_base else 2, unit))
        x = [point.position.value / unit for point in points]
        positions += x
        rows += [_curve_row(arm.name, point) for point in points]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "legendgroup": plotly_text(arm.name),
                "name": plotly_text(arm.name) + (" (baseline)" if is_base and arm.name != "baseline" else ""),
                "x": x,
                "y": [point.quality.value for point in points],
                "text": [_curve_hover(study, arm.description, point) for point in points],
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
                "marker": {"symbol": markers[arm.name], "size": 10 if is_base else 9, "color": colours[arm.name]},
                "error_y": interval_bars(points, "quality", 1.0, colours[arm.name]),
                "error_x": interval_bars(points, "position", unit, colours[arm.name]),
            }
        )
    traces.insert(0, _frontier_trace(study, palette, axis, unit))
    layout = base_layout(palette, height=480)
    layout["xaxis"] |= log_axis(positions, title)
    layout["yaxis"] |= {"title": axis_title(f"{study.quality_name} {study.unit}".strip())}
    layout["shapes"] = [_quality_line(study, palette, axis)]
    header = [
        "arm",
        "budget",
        axis,
        f"{axis}_low",
        f"{axis}_high",
        "quality",
        "quality_low",
        "quality_high",
        "n",
    ]
    label = f"{study.quality_name} against {AXIS_NAMES[axis]} in the study {study.name}"
    return Figure({"data": traces, "layout": layout}, label, csv_text([*header, "num_diverged"], rows))


def _curve_trace(curve: Curve, colour: str, width: int, unit: float) -> dict[str, Any]:
    """Draw the line that ratios are read off."""
    x, y = curve.line()
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plotly_text(curve.arm),
        "legendgroup": plotly_text(curve.arm),
        "showlegend": False,
        "hoverinfo": "skip",
        "x": [position / unit for position in x],
        "y": y,
        "line": {"color": colour, "width": width},
    }


def interval_bars(
    points: Sequence[CurvePoint], which: Literal["quality", "position"], unit: float, colour: str
) -> dict[str, Any]:
    """Return the error bars of points; a position's intervals are longer on the far side."""
    found = [getattr(point, which) for point in points]
    up = [0.0 if one.high is None else (one.high - one.value) / unit for one in found]
    down = [0.0 if one.low is None else (one.value - one.low) / unit for one in found]
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "color": colour,
        "thickness": 1,
        "width": 3,
        "visible": any(up + down),
    }


def _curve_row(arm: str, point: CurvePoint) -> list[object]:
    position, quality = point.position, point.quality
    ends = [position.value, position.low, position.high, quality.value, quality.low, quality.high]
    return [arm, point.budget, *ends, point.n, point.num_diverged]


def _curve_hover(study: StudyRecord, description: str, point: CurvePoint) -> str:
    found = point.quality
    text = plotly_text(f"{study.quality_name} {quality_text(study, found.value)}")
    text += f" ({interval_text(found.low, found.high, found.n, 4)})<br>budget {point.budget:g}"
    diverged = f"<br>{point.num_diverged} diverged" if point.num_diverged else ""
    return f"{text}{diverged}<br>{plotly_text(description)}"


def averaged(points: Sequence[tuple[T, float]], most: int) -> tuple[list[T], list[float]]:
    """Return at most so many steps and values; where there are more, means over windows, each at its end."""
    window = max(1, math.ceil(len(points) / most))
    groups = [points[start : start + window] for start in range(0, len(points), window)]
    return [group[-1][0] for group in groups], [math.fsum(v for _, v in group) / len(group) for group in groups]


def plotly_text(text: str) -> str:
    """Escape text that Plotly would read as its own subset of HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _frontier_trace(study: StudyRecord, palette: Palette, axis: Axis, unit: float) -> dict[str, Any]:
    points = [point for _, point in pareto_frontier(study, axis=axis)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "Pareto frontier",
        "x": [point.position.value / unit for point in points],
        "y": [point.quality.value for point in points],
        "line": {"color": palette.muted, "width": 6, "shape": "hv"},
        "opacity": 0.4,
        "hoverinfo": "skip",
    }


def _quality_line(study: StudyRecord, palette: Palette, axis: Axis) -> dict[str, Any]:
    qualities = [p.quality.value for p in tradeoff_curve(study, study.baseline_arm, axis=axis).points]
    best = (max if study.higher_is_better else min)(qualities, default=0.0)
    line = {"color": palette.accent, "width": 2, "dash": "dash"}
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": best,
        "y1": best,
        "line": line,
        "editable": True,
    }


def learning_figure(study: StudyRecord, palette: Palette, *, axis: Axis = "seconds") -> Figure:
    """Draw every run's evaluations in light lines, one trace an arm."""
    (title, unit), costs = axis_scale(study, axis), mean_costs(study, axis)
    colours, rows, traces = arm_colours(study, palette), [], []
    mode = "lines" if any(len(run.points) > 1 for run in study.runs) else "markers"  # a line needs two evaluations
    for arm in study.arms:
        x: list[float | None] = []
        y: list[float | None] = []
        for run in runs_of(study, arm.name):
            points = [point for point in thinned(run.points) if math.isfinite(point.quality)]
            places = [position_of(run, point, axis, costs) for point in points]
            x += [place / unit for place in places] + [None]
            y += [point.quality for point in points] + [None]
            rows += [
                [arm.name, run.budget, run.seed, place, point.quality]
                for place, point in zip(places, points, strict=True)
            ]
        line = {"color": colours[arm.name], "width": 1.3}
        trace = {
            "type": "scatter",
            "mode": mode,
            "name": plotly_text(arm.name),
            "x": x,
            "y": y,
            "line": line,
        }
        traces.append(trace | {"opacity": 0.5, "connectgaps": False, "hoverinfo": "name+x+y"})
    layout = base_layout(palette)
    layout["xaxis"] |= {"title": axis_title(title), "rangemode": "tozero"}
    layout["yaxis"] |= {"title": axis_title(f"{study.quality_name} {study.unit}".strip())}
    label = f"Learning curves of all {len(study.runs)} runs of the study {study.name}"
    return Figure({"data": traces, "layout": layout}, label, csv_text(["arm", "budget", "seed", axis, "quality"], rows))


def thinned(points: Sequence[EvaluationPoint]) -> list[EvaluationPoint]:
    """Return at most about `MAX_LINE_POINTS` of the points, the last one among them."""
    stride = max(1, math.ceil(len(points) / MAX_LINE_POINTS))
    return [*points[:-1:stride], *points[-1:]]


def mean_seconds_by_part(study: StudyRecord, arm: str) -> dict[str, float]:
    """Return the mean seconds of each part over the arm's runs at its largest budget, in a step's order.

    Runs without parts and those that diverged, which ended early, are in no mean.
    """
    runs = [run for run in runs_of(study, arm) if run.seconds_by_part and math.isfinite(run.final.quality)]
    largest = [run for run in runs if run.budget == max(run.budget for run in runs)]
    names = {name for run in largest for name in run.seconds_by_part}
    ordered = [name for name in TIME_PARTS if name in names] + sorted(names - set(TIME_PARTS))
    return {n: sum(run.seconds_by_part.get(n, 0.0) for run in largest) / len(largest) for n in ordered}


def breakdown_figure(study: StudyRecord, palette: Palette) -> Figure:
    """Draw the mean time of each part as stacked bars, one bar an arm, at each arm's largest budget."""
    by_arm = {arm.name: mean_seconds_by_part(study, arm.name) for arm in study.arms}
    unit, length = time_unit(max((sum(parts.values()) for parts in by_arm.values()), default=1.0))
    names = list(dict.fromkeys([*TIME_PARTS, *(name for parts in by_arm.values() for name in parts)]))
    cycle = (*(palette.series[i] for i in (2, 3, 0, 1, 4, 5)), palette.muted, palette.rule)
    arms, traces = [plotly_text(name) for name in by_arm], []
    for index, name in enumerate(names):
        seconds = [parts.get(name, 0.0) for parts in by_arm.values()]
        if any(seconds):
            marker = {"color": cycle[index % len(cycle)], "line": {"color": palette.surface, "width": 1}}
            x = [value / length for value in seconds]
            text = [f"{number(value / length)} {unit}" for value in seconds]
            trace = {
                "type": "bar",
                "orientation": "h",
                "name": plotly_text(name),
                "y": arms,
                "x": x,
                "marker": marker,
            }
            traces.append(
                trace | {"customdata": text, "hovertemplate": "%{y}: %{fullData.name} %{customdata}<extra></extra>"}
            )
    layout = base_layout(palette, height=170 + 44 * len(by_arm))
    layout["barmode"], layout["bargap"] = "stack", 0.35
    layout["xaxis"] |= {"title": axis_title(f"wall clock of a run ({unit})")}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    rows = [[arm, name, seconds] for arm, parts in by_arm.items() for name, seconds in parts.items()]
    label = f"Time of a run by part of the work for each arm of the study {study.name}"
    return Figure({"data": traces, "layout": layout}, label, csv_text(["arm", "part", "seconds"], rows))
