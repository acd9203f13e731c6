"""All points of many studies in one figure: the frontier, the baselines, and what lies between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cosmati.explorer.figures import Figure, axis_title, base_layout, csv_text, log_axis, plotly_text
from cosmati.explorer.palette import MARKERS, Palette
from cosmati.explorer.reaching import lost_text
from cosmati.explorer.wording import number, time_unit
from cosmati.store.tradeoffs import CostAxis, TradeoffPoint

MAX_DRAWN = 1500
"""More circles than that take a browser longer than a reader waits."""
MAX_BARS = 120
"""More error bars than that hide the points."""
MAX_HOVER, MAX_NAME = 70, 32
DASHES = ("solid", "dot", "dashdot", "longdash")
"""Of the frontiers, where there are several; the quality line is dashed."""
Grouping = Literal["study", "arm", "hardware", "method"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
AXIS_WORDS: dict[CostAxis, str] = {
    "seconds": "training time",
    "steps": "steps",
    "rows": "rows",
    "tokens": "tokens",
    "flops": "FLOPs",
    "cost": "cost",
}


@dataclass(frozen=True, kw_only=True)
class CloudLook:
    """How a cloud is drawn.

    Attributes:
        quality: Name of the measure.
        axis: What a point takes.
        grouping: What the colours say.
        line: Where the quality line lies, None for none.
        names: What each folder's study is called, where its own name isn't enough.
        recipes: What each recipe says, shortly, by its digest.
        is_priced: Whether all hardware's time has one price, so that a cost is a time.
    """

    quality: str
    axis: CostAxis = "seconds"
    grouping: Grouping = "arm"
    line: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, str] = field(default_factory=dict)
    is_priced: bool = False

    @property
    def is_time(self) -> bool:
        """Whether the axis is a time, so that each hardware has a frontier of its own."""
        return self.axis == "seconds" or self.is_priced


def cloud_scale(points: Sequence[TradeoffPoint], axis: CostAxis) -> tuple[str, float]:
    """Return the axis' title with its unit, and the length of that unit."""
    if axis == "seconds" and points:
        unit, length = time_unit(math.exp(sum(math.log(one.position) for one in points) / len(points)))
        return f"{AXIS_WORDS[axis]} ({unit})", length
    return f"{AXIS_WORDS[axis]} ($)" if axis == "cost" else AXIS_WORDS[axis], 1.0


def position_text(position: float, axis: CostAxis) -> str:
    """Return a position with its unit."""
    if axis == "seconds":
        unit, length = time_unit(position)
        return f"{number(position / length)}\u00a0{unit}"
    return f"{number(position)}\u00a0$" if axis == "cost" else number(position)


def drawn_points(points: Sequence[TradeoffPoint]) -> list[TradeoffPoint]:
    """Return the frontier, the baselines, and as many of the others as a browser draws at once, evenly taken."""
    marked = [one for one in points if one.is_on_frontier or one.is_baseline]
    others = [one for one in points if not (one.is_on_frontier or one.is_baseline)]
    return [*(others[:: -(-len(others) // MAX_DRAWN)] if others else []), *marked]


def cloud_figure(points: Sequence[TradeoffPoint], palette: Palette, look: CloudLook) -> Figure:
    """Draw points with their frontier; its numbers aren't with it, see `cloud_csv`.

    `layout.shapes[0]` is the quality line, where there is one.

    Args:
        points: ordered by position.
        palette: of the page.
        look: how.
    """
    title, unit = cloud_scale(points, look.axis)
    drawn = drawn_points(points)
    layout = base_layout(palette, height=480)
    layout["xaxis"] |= log_axis([one.position / unit for one in points], title)
    layout["yaxis"] |= {"title": axis_title(_quality_title(points, look.quality))}
    layout["hovermode"] = "closest"
    layout["hoverlabel"]["align"] = "left"
    layout["margin"]["t"] = 16
    if look.line is not None:
        layout["shapes"] = [_quality_line(look.line, palette)]
    traces = [
        *_frontiers(points, palette, look, unit),
        *_groups(drawn, palette, look, unit),
        *(_key(*one) for one in _marks(points, palette)),
    ]
    quality = look.quality or "Quality"
    label = f"{quality} against {AXIS_WORDS[look.axis]}: {len(points):,} points of {sum(p.n for p in points):,} runs"
    if len(drawn) < len(points):
        label += f", {len(drawn):,} of them drawn: the frontier, the baselines, and others evenly taken"
    return Figure({"data": traces, "layout": layout}, label, "")


def cloud_csv(points: Sequence[TradeoffPoint], look: CloudLook) -> str:
    """Return all points as CSV, drawn or not; positions are in seconds, counts, or the price's currency."""
    header = ("study", "folder", "arm", "methods", "hardware", "budget", "n", look.axis, look.quality or "quality")
    rows = [
        (
            one.study,
            one.path,
            one.arm,
            ", ".join(one.methods),
            one.hardware,
            one.budget,
            one.n,
            one.position,
            one.quality,
            one.error,
            one.is_baseline,
            one.is_on_frontier,
            one.num_lost,
        )
        for one in points
    ]
    return csv_text((*header, "standard_error", "is_baseline", "is_on_frontier", "diverged_or_failed"), rows)


def _quality_title(points: Sequence[TradeoffPoint], quality: str) -> str:
    up = points[0].higher_is_better if points else None
    return quality if up is None else f"{quality} ({'higher' if up else 'lower'} is better)"


def _quality_line(at: float, palette: Palette) -> dict[str, Any]:
    line = {"color": palette.ink, "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line, "editable": True}


def _frontiers(points: Sequence[TradeoffPoint], palette: Palette, look: CloudLook, unit: float) -> list[dict[str, Any]]:
    """Return a stepped line, or one for each hardware where its time is its own."""
    found: dict[str, list[TradeoffPoint]] = {}
    for one in points:
        if one.is_on_frontier:
            found.setdefault((one.hardware or "unknown hardware") if look.is_time else "", []).append(one)
    found = found or {"": []}  # the legend's first line
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto frontier" + (f": {plotly_text(_short(hardware, MAX_NAME))}" if len(found) > 1 else ""),
            "x": [one.position / unit for one in frontier],
            "y": [one.quality for one in frontier],
            "line": {"color": palette.accent, "width": 1.6, "shape": "hv", "dash": DASHES[place % len(DASHES)]},
            "hoverinfo": "skip",
        }
        for place, (hardware, frontier) in enumerate(sorted(found.items(), key=lambda one: -len(one[1])))
    ]


def _groups(drawn: Sequence[TradeoffPoint], palette: Palette, look: CloudLook, unit: float) -> list[dict[str, Any]]:
    """Return a trace a group: those on the frontier, then the largest, in the series' colours, all others in one."""
    group_of = _grouping(look)
    ahead = {group_of(one) for one in drawn if one.is_on_frontier}
    names = sorted((sizes := Counter(map(group_of, drawn))), key=lambda name: (name not in ahead, -sizes[name]))
    own = names if len(names) <= len(palette.series) else names[: len(palette.series) - 1]
    found: dict[str, list[TradeoffPoint]] = {name: [] for name in own}
    rest: list[TradeoffPoint] = []
    for one in drawn:
        found.get(group_of(one), rest).append(one)
    traces = [
        _markers(group, _short(name, MAX_NAME), palette.series[place], MARKERS[place], (palette, look, unit))
        for place, (name, group) in enumerate(found.items())
    ]
    if rest:
        name = f"{len(names) - len(own):,} others"
        traces.insert(0, _markers(rest, name, palette.muted, "circle", (palette, look, unit)))
    if len(drawn) <= MAX_BARS:
        for trace, group in zip(traces, ([rest] if rest else []) + list(found.values()), strict=True):
            bars = {"type": "data", "array": [one.error or 0.0 for one in group], "thickness": 1, "width": 0}
            trace["error_y"] = bars | {"color": trace["marker"]["color"]}
    return traces


def _grouping(look: CloudLook) -> Callable[[TradeoffPoint], str]:
    if look.grouping == "study":
        return lambda one: look.names.get(one.path, one.study) or "runs by themselves"
    if look.grouping == "hardware":
        return lambda one: one.hardware or "unknown hardware"
    if look.grouping == "method":
        return lambda one: " + ".join(one.methods) or "no methods"
    return lambda one: one.arm


def _markers(
    points: Sequence[TradeoffPoint], name: str, colour: str, symbol: str, rest: tuple[Palette, CloudLook, float]
) -> dict[str, Any]:
    palette, look, unit = rest
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plotly_text(name),
        "x": [one.position / unit for one in points],
        "y": [one.quality for one in points],
        "customdata": [f"/runs/{one.key}" for one in points],
        "text": [_hover(one, look) for one in points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": colour,
            "size": [10 if one.is_on_frontier or one.is_baseline else 8 for one in points],
            "symbol": ["square" if one.is_baseline else symbol for one in points],
            "opacity": 0.85,
            "line": {
                "color": palette.ink,
                "width": [1.8 if one.is_on_frontier else 0 for one in points],
            },
        },
    }


def _marks(points: Sequence[TradeoffPoint], palette: Palette) -> list[tuple[str, dict[str, Any]]]:
    found = []
    if any(one.is_baseline for one in points):
        found.append(("square: a baseline", {"symbol": "square", "color": palette.muted, "size": 10}))
    if any(one.is_on_frontier for one in points):
        ring = {"color": palette.ink, "width": 1.8}
        found.append(("ring: on the frontier", {"symbol": "circle", "color": palette.surface, "size": 9, "line": ring}))
    return found


def _key(name: str, marker: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace that stands in the legend alone."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None], "marker": dict(marker)}


def _hover(one: TradeoffPoint, look: CloudLook) -> str:
    spread = "" if one.error is None else f" ± {number(one.error, 2)} (standard error)"
    facts = [
        f"{look.quality} {number(one.quality, 4)}{spread}, n = {one.n}",
        lost_text(one.num_lost, one.n + one.num_lost),
        position_text(one.position, look.axis) + ("" if one.budget is None else f", budget {one.budget:g}"),
        look.names.get(one.path, one.study) + (": the baseline" if one.is_baseline else ""),
        " + ".join(one.methods),
        one.hardware,
        look.recipes.get(one.recipe, ""),
    ]
    lines = (plotly_text(_short(line, MAX_HOVER)) for line in facts if line)
    return "<br>".join((f"<b>{plotly_text(_short(one.arm, MAX_HOVER))}</b>", *lines))


def _short(text: str, most: int) -> str:
    """Return the beginning and the end of a long text: names can differ in either."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - (most - most // 2) :]}"
