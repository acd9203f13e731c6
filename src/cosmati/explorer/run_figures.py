"""Figures of one run: losses and metrics over its steps, and what its policy allowed and its classes did."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cosmati.explorer.class_marks import PATTERNS, ClassMark, class_marks, marks_of
from cosmati.explorer.figures import MAX_LINE_POINTS, Figure, averaged, axis_title, base_layout, csv_text, plotly_text
from cosmati.explorer.learning import ClassSchedule
from cosmati.explorer.loss_figure import has_loss_curve, is_in_loss_figure, loss_figure
from cosmati.explorer.palette import Palette
from cosmati.explorer.run_view import Points, RunView
from cosmati.explorer.wording import number, weight_text
from cosmati.records.governance import ContributionTotal, GovernanceFacts

MAX_SPANS = 64
"""Of a run's steps, in the figures that show classes over time."""
_MAX_LABEL = 26
_GRID_FONT = 11
GRID_LABELS, GRID_COLUMN = 104, 56
"""Least width of a grid, in pixels: its labels, and each region. Four regions fit a phone."""


def run_figures(
    run: RunView, palette: Palette, *, has_curves_csv: bool = True, twin: RunView | None = None
) -> dict[str, Figure]:
    """Return the run's figures by their id, in the order of the page.

    Args:
        run: what is drawn.
        palette: of the page.
        has_curves_csv: write all points of curves as CSV, too; a page that is served gives that an address.
        twin: the same training without the policy, to draw beside it.
    """
    csv, marks = has_curves_csv, class_marks(run)
    figures = {"loss": loss_figure(run, palette, twin, has_csv=csv)} if has_loss_curve(run) else {}
    figures |= {
        f"metric-{index}": line_figure(name, points, palette, has_csv=csv)
        for index, (name, points) in enumerate(run.metrics.items())
        if len(points) > 1 and not (figures and is_in_loss_figure(run, name))
    }
    figures |= {
        f"step-{index}": line_figure(name, points, palette, has_csv=csv)
        for index, (name, points) in enumerate(run.beside.items())
        if len(points) > 1
    }
    facts = run.governance
    if facts is None:
        return figures
    figures |= {
        f"policy-{index}": heat_map_figure(facts, phase, palette, marks) for index, phase in enumerate(facts.phases)
    }
    if facts.totals:
        figures["shares"] = shares_figure(facts, palette, marks)
    if run.schedule:
        figures["schedule"] = schedule_figure(run.schedule, run.classes_seen, palette)
    regions = [region for region in facts.regions if any(one.region == region for one in facts.contribution)]
    return figures | {
        f"contribution-{index}": contribution_figure(facts, region, run.classes_seen, palette)
        for index, region in enumerate(regions)
    }


def line_figure(name: str, points: Points, palette: Palette, *, has_csv: bool = True) -> Figure:
    """Draw one value over the steps of a run; its CSV has all points."""
    finite = [(step, value) for step, value in points if value is not None]
    x, y = averaged(finite, MAX_LINE_POINTS)
    trace = {
        "type": "scatter",
        "mode": "lines" if len(x) > 30 else "lines+markers",
        "x": x,
        "y": y,
        "line": {"color": palette.accent, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}<extra></extra>",
    }
    layout = _small_layout(name, palette)
    layout["xaxis"] |= {"title": axis_title("steps done"), "rangemode": "tozero"}
    table = csv_text(["step", name], points) if has_csv else ""
    return Figure({"data": [trace], "layout": layout}, f"{name} over the steps", table)


def _small_layout(title: str, palette: Palette) -> dict[str, Any]:
    layout = base_layout(palette, height=240) | {
        "showlegend": False,
        "title": {"text": plotly_text(elided(title)), "x": 0.02, "font": {"size": 14}},
    }
    layout["margin"] = {"l": 48, "r": 12, "t": 40, "b": 44}
    layout["yaxis"]["exponentformat"] = "power"
    return layout


def elided(name: str, limit: int = _MAX_LABEL) -> str:
    """Return a name that fits beside a figure: its ends, where it's long."""
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"


def wrapped(name: str, width: int = 11) -> list[str]:
    """Return a name in lines that fit above a column, broken after punctuation where that is possible."""
    lines = [""]
    for part in re.findall(rf".{{1,{width - 1}}}?[-_/. ]|.{{1,{width}}}", elided(name, 3 * width)):
        if len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def weighted_classes(facts: GovernanceFacts, phase: str) -> tuple[str, ...]:
    """Return the classes that have weight in a phase; all of them where none has."""
    found = tuple(name for name in facts.classes if any(facts.weight[name][phase].values()))
    return found or facts.classes


def heat_map_figure(
    facts: GovernanceFacts, phase: str, palette: Palette, marks: Mapping[str, ClassMark] | None = None
) -> Figure:
    """Draw the policy's weights of one phase, classes down, regions across, each weight in its cell.

    Classes without any weight in the phase aren't drawn. The CSV has all.
    """
    classes = weighted_classes(facts, phase)
    cells = [[facts.weight[name][phase][region] for region in facts.regions] for name in classes]
    hover = [[plotly_text(facts.decision[name][phase])] * len(facts.regions) for name in classes]
    text = [[weight_text(value) for value in row] for row in cells]
    rows = [
        [name, phase, region, facts.weight[name][phase][region], facts.decision[name][phase]]
        for name in facts.classes
        for region in facts.regions
    ]
    table = csv_text(["class", "phase", "region", "weight", "decision"], rows)
    label = f"Policy in the phase {phase}: which class may teach which region, as weights"
    grid = _grid(classes, facts.regions, cells, text, hover, palette, least_top=1.0, marks=marks or {})
    return Figure(grid, label, table)


def shares_figure(facts: GovernanceFacts, palette: Palette, marks: Mapping[str, ClassMark] | None = None) -> Figure:
    """Draw each class's share of a region's logged gradient norms; of its rows where none was logged, or one is sealed.

    Classes without any share aren't drawn. The CSV has all.
    """
    names = dict.fromkeys(one.class_name for one in facts.totals)
    found = {
        (name, region): ContributionTotal(name, region, 0, 0, 0.0, 0.0) for name in names for region in facts.regions
    }
    found |= {(one.class_name, one.region): one for one in facts.totals}
    by_norm = any(one.norm_sum for one in facts.totals) and not any(one.num_sealed for one in facts.totals)
    rows_of = Counter({region: sum(t.num_rows for t in facts.totals if t.region == region) for region in facts.regions})

    def share(one: ContributionTotal) -> float:
        return one.share if by_norm else one.num_rows / max(1, rows_of[one.region])

    classes = [name for name in names if any(share(found[name, region]) for region in facts.regions)] or list(names)
    cells = [[share(found[name, region]) for region in facts.regions] for name in classes]
    text = [["–" if not value else f"{100 * value:.3g} %" for value in row] for row in cells]
    hover = [[_hover(found[name, region]) for region in facts.regions] for name in classes]
    of_what = "gradient norms" if by_norm else "rows"
    rows = [[one.class_name, one.region, one.num_steps, one.num_rows, _norms(one), share(one)] for one in facts.totals]
    return Figure(
        _grid(classes, facts.regions, cells, text, hover, palette, least_top=1e-9, marks=marks or {}),
        f"Share of each class in the {of_what} of each region",
        csv_text(["class", "region", "steps", "rows", "norm_sum", f"share_of_{of_what.replace(' ', '_')}"], rows),
    )


def grid_width(facts: GovernanceFacts) -> int:
    """Return the least width in pixels at which a grid of classes and regions can be read."""
    return GRID_LABELS + GRID_COLUMN * len(facts.regions)


def _hover(one: ContributionTotal) -> str:
    norms = "norms sealed" if one.num_sealed else f"sum of norms {number(one.norm_sum)}"
    return f"{one.num_rows:,} rows in {one.num_steps:,} steps<br>{norms}"


def _norms(one: ContributionTotal) -> float | str:
    return "sealed" if one.num_sealed else one.norm_sum


def _grid(
    classes: Sequence[str],
    regions: Sequence[str],
    cells: Sequence[Sequence[float]],
    text: Sequence[Sequence[str]],
    hover: Sequence[Sequence[str]],
    palette: Palette,
    *,
    least_top: float,
    marks: Mapping[str, ClassMark],
) -> dict[str, Any]:
    """Draw a value for each class and region; the highest one, `least_top` at least, has the full colour.

    Places are numbers, so that two names may look alike.
    """
    shown = [
        [
            f"{plotly_text(name)} → {plotly_text(region)}<br>{value}<br>{more}"
            for region, value, more in zip(regions, *row, strict=True)
        ]
        for name, *row in zip(classes, text, hover, strict=True)
    ]
    trace = {
        "type": "heatmap",
        "x": list(range(len(regions))),
        "y": list(range(len(classes))),
        "z": cells,
        "zmin": 0,
        "zmax": max([least_top, *(value for row in cells for value in row)]),
        "text": text,
        "texttemplate": "%{text}",
        "textfont": {"color": palette.ink, "size": 12},
        "customdata": shown,
        "hovertemplate": "%{customdata}<extra></extra>",
        "colorscale": [[0, palette.denied], [1, palette.full]],
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
    }
    above = [wrapped(name, 9) for name in regions]
    small = {"tickfont": {"size": _GRID_FONT}}
    head = 44 + 16 * max(len(lines) for lines in above)
    layout = base_layout(palette, height=head + 16 + 40 * len(classes))
    layout["margin"] = {"l": 8, "r": 4, "t": head, "b": 12}
    layout["xaxis"] |= {"side": "top", "showgrid": False, "fixedrange": True, "tickangle": 0} | small
    layout["xaxis"] |= {"tickvals": trace["x"], "ticktext": ["<br>".join(map(plotly_text, one)) for one in above]}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "fixedrange": True} | small
    labels = ["<br>".join(map(plotly_text, wrapped(name, 14))) for name in classes]
    marked = [marks[n].label(label, palette) if n in marks else label for n, label in zip(classes, labels, strict=True)]
    layout["yaxis"] |= {"tickvals": trace["y"], "ticktext": marked}
    return {"data": [trace], "layout": layout}


def contribution_figure(facts: GovernanceFacts, region: str, classes: Sequence[str], palette: Palette) -> Figure:
    """Draw the gradient norms that each class left in `region` over the steps: one line for each of the classes."""
    traces, rows, marks = [], [], marks_of(tuple(classes))
    for series in (one for one in facts.contribution if one.region == region and one.class_name in classes):
        x, y = averaged(list(zip(series.steps, series.norms, strict=True)), MAX_SPANS)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plotly_text(elided(series.class_name)),
                "x": x,
                "y": y,
                "line": marks[series.class_name].line(palette, 1.8),
            }
        )
        rows += [[series.class_name, region, step, norm] for step, norm in zip(x, y, strict=True)]
    layout = _small_layout(region, palette)
    layout["xaxis"] |= {"title": axis_title("step"), "rangemode": "tozero"}
    layout["yaxis"] |= {"rangemode": "tozero"}
    label = f"Gradient norm by class in the region {region} over the steps"
    return Figure({"data": traces, "layout": layout}, label, csv_text(["class", "region", "step", "norm"], rows))


def schedule_figure(schedule: ClassSchedule, classes: Sequence[str], palette: Palette) -> Figure:
    """Draw how many microbatches of each class came when: a bar for each span of steps, a part for each class."""
    span = max(1, math.ceil(len(schedule) / MAX_SPANS))
    spans = [schedule[start : start + span] for start in range(0, len(schedule), span)]
    counts = [Counter(name for step in steps for name in step) for steps in spans]
    traces, rows = [], []
    for name, (place, around) in marks_of(tuple(classes)).items():
        pattern = {
            "shape": PATTERNS[around % len(PATTERNS)],
            "fillmode": "overlay",
            "fgcolor": palette.surface,
            "size": 5,
        }
        traces.append(
            {
                "type": "bar",
                "name": plotly_text(elided(name)),
                "x": [start * span for start in range(len(spans))],
                "y": [count[name] for count in counts],
                "width": span,
                "offset": 0,
                "marker": {"color": palette.series[place], "pattern": pattern, "line": {"width": 0}},
                "hovertemplate": f"%{{y}} microbatches in {span} steps from %{{x}}<extra>%{{fullData.name}}</extra>",
            }
        )
        rows += [[name, start * span, count[name]] for start, count in enumerate(counts)]
    layout = base_layout(palette, height=300) | {"barmode": "stack", "bargap": 0, "showlegend": False}
    layout["xaxis"] |= {"title": axis_title("step"), "rangemode": "tozero", "showgrid": False}
    steps = "a step" if span == 1 else f"in {span} steps"
    layout["yaxis"] |= {"title": axis_title(f"microbatches {steps}")}
    label = f"Microbatches of each class {steps}, over the run"
    return Figure({"data": traces, "layout": layout}, label, csv_text(["class", "first_step", "microbatches"], rows))
