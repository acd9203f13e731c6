"""Figures of the composition view: parts alone as bars, pairs as a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from cosmati.explorer.composition_page import MEASURE_WORDS, STATE_WORDS, GainState, PartGain, PartsView, state_of
from cosmati.explorer.composition_view import joint_verdict
from cosmati.explorer.figures import Figure, axis_title, base_layout, csv_text, plotly_text
from cosmati.explorer.palette import Palette
from cosmati.explorer.run_figures import elided
from cosmati.explorer.wording import AXIS_NAMES, estimate_text, number
from cosmati.study.comparison import NotReached
from cosmati.study.composition import Measure, Together
from cosmati.study.statistics import Estimate

CELL_WIDTH = 98
_CELL_HEIGHT = 58


def alone_figure(view: PartsView, palette: Palette) -> Figure:
    """Draw each part's own gain as a bar from no effect on, with its interval; grey where no difference is shown."""
    found = [one for one in reversed(view.gains) if one.value is not None]
    values = [cast("float", one.value) for one in found]
    ends = [
        end
        for one in found
        for end in (one.low, one.high)
        if end is not None and _is_near(end, view.neutral, [*values, view.neutral], view.measure)
    ]
    least, most = _span([*values, *ends, view.neutral], view.measure)
    low = [max(least, value if one.low is None else one.low) for one, value in zip(found, values, strict=True)]
    high = [min(most, value if one.high is None else one.high) for one, value in zip(found, values, strict=True)]
    fills = {"better": palette.good, "worse": palette.bad, "none shown": palette.rule, "not measured": palette.rule}
    trace = {
        "type": "bar",
        "orientation": "h",
        "base": [view.neutral] * len(found),
        "x": [value - view.neutral for value in values],
        "y": list(range(len(found))),
        "marker": {"color": [fills[one.state] for one in found], "line": {"width": 1, "color": palette.muted}},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [end - value for end, value in zip(high, values, strict=True)],
            "arrayminus": [value - end for end, value in zip(low, values, strict=True)],
            "color": palette.ink,
            "thickness": 1.5,
            "width": 5,
        },
        "customdata": [plotly_text(f"{one.part}: {one.text}; {STATE_WORDS[one.state]}") for one in found],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    layout = base_layout(palette, height=84 + 34 * max(1, len(found)))
    layout["bargap"], layout["margin"]["t"] = 0.35, 10
    layout["xaxis"] |= _value_axis(view, least, most)
    layout["yaxis"] |= {"tickvals": trace["y"], "ticktext": [plotly_text(elided(one.part)) for one in found]}
    layout["yaxis"] |= {"showgrid": False, "range": [-0.6, max(0.6, len(found) - 0.4)]}
    line = {"color": palette.ink, "width": 1.5}
    layout["shapes"] = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": view.neutral, "x1": view.neutral, "line": line}
    ]
    rows = [[one.part, one.arm, one.value, one.low, one.high, one.n, STATE_WORDS[one.state]] for one in view.gains]
    header = ["part", "arm", view.measure, "low", "high", "n", "shown"]
    label = f"What each part alone gives in the study {view.record.name}, as {MEASURE_WORDS[view.measure]}"
    return Figure({"data": [trace], "layout": layout}, label, csv_text(header, rows))


def _is_near(end: float, neutral: float, values: Sequence[float], measure: Measure) -> bool:
    """Whether an interval's end lies where the picture can show it without the rest becoming a point."""
    if measure == "speed-up":
        return min(values) / 2 <= end <= max(values) * 2
    reach = 2.5 * max(abs(value - neutral) for value in values) or float("inf")
    return abs(end - neutral) <= reach


def _span(values: Sequence[float], measure: Measure) -> tuple[float, float]:
    low, high = min(values), max(values)
    if measure == "speed-up":
        return low / 1.06, high * 1.06
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _value_axis(view: PartsView, least: float, most: float) -> dict[str, Any]:
    if view.measure == "speed-up":
        title = f"speed-up, by {AXIS_NAMES[view.axis]}"
        return {"title": axis_title(title), "range": [least, most], "ticksuffix": "×"}
    title = "difference in quality; right is better"
    return {"title": axis_title(title), "range": [least, most]}


def matrix_figure(view: PartsView, palette: Palette) -> Figure | None:
    """Draw a triangle: a part's own gain on the diagonal, what pairs do together below it; None without pairs."""
    paired = {arm for one in view.pairs for arm in one.alone}
    gains = [one for one in view.gains if one.arm in paired]
    if not gains:
        return None
    found = {frozenset(one.alone): one for one in reversed(view.pairs)}
    cells = [
        (row, column, *_pair_cell(view, found.get(frozenset((gains[row].arm, gains[column].arm)))))
        for row in range(len(gains))
        for column in range(row)
    ]
    cells += [(place, place, one.state, *_gain_lines(view, one)) for place, one in enumerate(gains)]
    fills = {"better": palette.good, "worse": palette.bad, "none shown": palette.denied, "not measured": palette.paper}
    inks = {"better": palette.paper, "worse": palette.paper, "none shown": palette.ink, "not measured": palette.muted}
    shapes, notes = [], []
    for row, column, state, text, _ in cells:
        box = {"type": "rect", "x0": column - 0.48, "x1": column + 0.48, "y0": row - 0.46, "y1": row + 0.46}
        edge = {"color": palette.ink if row == column else palette.rule, "width": 1.5 if row == column else 1}
        shapes.append(box | {"fillcolor": fills[state], "line": edge, "layer": "below"})
        note = {"x": column, "y": row, "text": text, "showarrow": False}
        notes.append(note | {"font": {"size": 12, "color": inks[state]}})
    names = [plotly_text(elided(one.part, 16)) for one in gains]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [column for _, column, *_ in cells],
        "y": [row for row, *_ in cells],
        "marker": {"size": 44, "opacity": 0, "symbol": "square"},
        "customdata": [hover for *_, hover in cells],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }
    layout = base_layout(palette, height=70 + _CELL_HEIGHT * len(gains))
    layout["margin"] = {"l": 20, "r": 10, "t": 44, "b": 12}
    ticks = {"tickvals": list(range(len(gains))), "ticktext": names, "showgrid": False, "fixedrange": True}
    layout["xaxis"] |= {**ticks, "side": "top", "tickangle": 0, "range": [-0.55, len(gains) - 0.45]}
    layout["yaxis"] |= {**ticks, "range": [len(gains) - 0.45, -0.55]}
    layout["shapes"], layout["annotations"] = shapes, notes
    label = f"Interactions of pairs of parts in the study {view.record.name}, as {MEASURE_WORDS[view.measure]}"
    return Figure({"data": [trace], "layout": layout}, label, _matrix_csv(view, gains))


def _gain_lines(view: PartsView, one: PartGain) -> tuple[str, str]:
    words = _lines(view, one.value, one.low, one.high, one.state)
    return words, plotly_text(f"{one.part} alone: {one.text}; {STATE_WORDS[one.state]}")


def _pair_cell(view: PartsView, one: Together | None) -> tuple[GainState, str, str]:
    if one is None:
        return "not measured", "no arm", "no arm has this pair"
    name, state, found = plotly_text(one.arm), state_of(one), one.ratio
    if isinstance(found, NotReached):
        return state, "not<br>measured", f"{name}: {plotly_text(found.reason)}"
    hover = f"{name}: {estimate_text(found)}<br>{joint_verdict(one)}"
    return state, _lines(view, found.value, found.low, found.high, state), hover


def _lines(view: PartsView, value: float | None, low: float | None, high: float | None, state: GainState) -> str:
    """Return a cell's two lines: the figure, with a sign where something is shown, and its interval."""
    if value is None:
        return "not<br>measured"
    sign = {"better": "▲ ", "worse": "▼ "}.get(state, "")
    is_ratio = view.measure == "speed-up"
    figure = f"{sign}{number(value)}×" if is_ratio else f"{sign}{_even(view, value)}"
    if low is None or high is None:
        return f"{figure}<br>one seed"
    start = "open" if low == -math.inf or (is_ratio and low == 0) else number(low, 2) if is_ratio else _even(view, low)
    end = "open" if high == math.inf else number(high, 2) if is_ratio else _even(view, high)
    return f"{figure}<br>{start} to {end}"


def _even(view: PartsView, value: float) -> str:
    """Return a difference with as many decimals as all of the picture have: two digits of the largest."""
    largest = max((abs(one.value) for one in view.gains if one.value), default=1.0)
    decimals = max(0, 1 - math.floor(math.log10(largest)))
    return f"{value:z.{decimals}f}".replace("-", "−")


def _matrix_csv(view: PartsView, gains: Sequence[PartGain]) -> str:
    rows: list[list[object]] = [
        [one.part, one.part, one.arm, one.value, one.low, one.high, one.n, STATE_WORDS[one.state]] for one in gains
    ]
    names = {one.arm: one.part for one in gains}
    for one in view.pairs:
        found = one.ratio
        value = [found.value, found.low, found.high, found.n] if isinstance(found, Estimate) else [None, None, None, 0]
        rows.append([*(names[arm] for arm in one.alone), one.arm, *value, STATE_WORDS[state_of(one)]])
    return csv_text(["part", "with", "arm", view.measure, "low", "high", "n", "shown"], rows)
