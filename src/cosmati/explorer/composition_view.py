"""What a study says about parts: each alone, several together, which to add next; and a picture of all speed-ups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cosmati.explorer.figures import Figure, arm_colours, axis_title, base_layout, csv_text, plotly_text
from cosmati.explorer.palette import Palette
from cosmati.explorer.wording import estimate_text, number, p_text, ratio_interval_text, ratio_text
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import SCREENING_LEVEL, NotReached, SpeedUp, speed_up_at_equal_quality
from cosmati.study.composition import Candidate, Together, joint_effects, single_parts, what_to_add
from cosmati.study.curves import available_axes
from cosmati.study.noise import compared_arms

_LEAST, _MOST = 1 / 8, 8.0
_MAX_TICKS, _FINE = 5, (0.7, 0.8, 1.25, 1.5, 3.0)
TextRow = tuple[str, ...]


@dataclass(frozen=True)
class CompositionView:
    """Rows of the tables of parts, and sentences on what to add next; all empty where no arm has a part alone.

    `rule` says at what level parts are said to help each other.
    """

    singles: tuple[TextRow, ...]
    joint: tuple[TextRow, ...]
    advice: tuple[str, ...]
    rule: str = ""


def composition_view(study: StudyRecord) -> CompositionView:
    """Work out what the page says about a study's parts."""
    if not study.runs:
        return CompositionView((), (), ())
    singles = []
    for part in single_parts(study).values():
        gain = part.gain
        figures = (gain.reason, "—") if isinstance(gain, NotReached) else (ratio_text(gain), ratio_interval_text(gain))
        singles.append((part.name, part.arm, *figures))
    several = [arm.name for arm in compared_arms(study) if len(arm.methods) > 1]
    found = joint_effects(study)
    sums = joint_effects(study, axis="rows" if "rows" in available_axes(study) else "step", measure="difference")
    advice = tuple(advice_text(arm, parts) for arm, parts in what_to_add(study, several).items() if parts)
    return CompositionView(tuple(singles), tuple(map(_joint_row, found, sums)), advice, _rule(found))


def _rule(found: Sequence[Together]) -> str:
    """Return at what level a verdict is given; empty where nothing was measured."""
    num_tests = max((one.num_tests for one in found), default=0)
    if not num_tests:
        return ""
    adjusted = f", adjusted for all {num_tests} of them (Holm)" if num_tests > 1 else ""
    return f"Verdicts are a screening: p < {SCREENING_LEVEL}{adjusted}, and an interval without 1."


def _joint_row(found: Together, beyond_sum: Together) -> TextRow:
    other = ", ".join(found.with_other_settings)
    return (
        found.arm,
        " × ".join((*found.parts, *found.unknown)),
        estimate_text(found.ratio),
        joint_verdict(found),
        "—" if found.unknown else difference_text(beyond_sum),
        f"{other} stands alone with other settings" if other else "—",
    )


def joint_verdict(found: Together) -> str:
    """Say in words what parts do together, with the p-value where there is one."""
    if isinstance(found.ratio, NotReached):
        return "not measured"
    words = "no interaction is shown"
    if found.is_shown:
        words = "they help each other" if found.ratio.value > found.neutral else "they get in each other's way"
    return words if found.p_value is None else f"{words}, {p_text(found.p_value, found.num_tests)}"


def difference_text(found: Together) -> str:
    """Return what parts do together in quality, beyond the sum of what they do alone, with its verdict."""
    figures = estimate_text(found.ratio)
    return figures if isinstance(found.ratio, NotReached) else f"{figures}: {joint_verdict(found)}"


def advice_text(arm: str, found: Sequence[Candidate], *, is_baseline: bool = False) -> str:
    """Say which parts to add next to an arm, and what that rests on. The baseline has no part to make a pair with."""
    basis = [("as alone" if is_baseline else _basis(one)) for one in found[:3]]
    named = [
        f"{one.part.name} (about {number(one.expected)}×, {words})" for one, words in zip(found, basis, strict=False)
    ]
    return f"To {arm}, add next: {', then '.join(named)}."


def _basis(one: Candidate) -> str:
    if one.num_measured:
        text = f"with {one.num_measured} measured {'pair' if one.num_measured == 1 else 'pairs'}"
    elif one.num_unread:
        text = "as alone"
    else:
        return "as alone: no pair with it is measured"
    if not one.num_unread:
        return text
    unread = "1 pair was run, but its" if one.num_unread == 1 else f"{one.num_unread} pairs were run, but their"
    return f"{text}: {unread} interaction can't be read off"


def gains_figure(study: StudyRecord, palette: Palette) -> Figure:
    """Draw every arm's speed-up by time with its interval, the largest on top; an open end runs to the edge."""
    found = {arm.name: speed_up_at_equal_quality(study, arm.name) for arm in compared_arms(study)}
    reached = {arm: one for arm, one in found.items() if isinstance(one, SpeedUp)}
    arms = sorted(reached, key=lambda arm: reached[arm].ratio)
    colours = arm_colours(study, palette)
    x = [reached[arm].ratio for arm in arms]
    low, high = _range([reached[arm] for arm in arms])
    ends = [_ends(reached[arm], low, high) for arm in arms]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": [plotly_text(arm) for arm in arms],
        "marker": {"size": 10, "color": [colours[arm] for arm in arms]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - ratio for ratio, (_, high) in zip(x, ends, strict=True)],
            "arrayminus": [ratio - low for ratio, (low, _) in zip(x, ends, strict=True)],
            "color": palette.muted,
            "thickness": 1.5,
            "width": 4,
        },
        "text": [f"{ratio_text(reached[arm])} ({ratio_interval_text(reached[arm])})" for arm in arms],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    layout = base_layout(palette, height=150 + 34 * max(1, len(arms)))
    near = (0.125, 0.25, 0.5, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
    far = [scale * 10.0**power for power in range(1, 7) for scale in (1, 3)]
    ticks = [tick for tick in (*(1 / one for one in reversed(far)), *near, *far) if low <= tick <= high]
    if len(ticks) > _MAX_TICKS:  # more would lie over one another on a phone
        ticks = [tick for tick in ticks if tick not in _FINE]
    layout["xaxis"] |= {
        "type": "log",
        "title": axis_title("speed-up at equal quality"),
        "tickvals": ticks,
        "ticktext": [f"{tick:.3g}×" for tick in ticks],
        "tickangle": 0,
        "range": [math.log10(low), math.log10(high)],
    }
    layout["yaxis"] |= {"showgrid": False, "type": "category"}
    line = {"color": palette.accent, "width": 2, "dash": "dash"}
    layout["shapes"] = [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1, "line": line}]
    rows = [[arm, one.ratio, one.low, one.high, one.n] for arm, one in reached.items()]
    label = f"Speed-ups of the study {study.name} with their 95 % intervals"
    return Figure({"data": [trace], "layout": layout}, label, csv_text(["arm", "ratio", "low", "high", "n"], rows))


def _range(found: list[SpeedUp]) -> tuple[float, float]:
    """Return what is drawn: all ratios, closed ends within a factor of eight, and a little more."""
    ends = [end for one in found for end in (one.low, one.high) if end is not None and _LEAST <= end <= _MOST]
    kept = [0.85, 1.18, *(one.ratio for one in found), *ends]
    return min(kept) / 1.05, max(kept) * 1.05


def _ends(found: SpeedUp, least: float, most: float) -> tuple[float, float]:
    """Return an interval's ends inside what is drawn."""
    low = found.ratio if found.low is None else found.low
    high = found.ratio if found.high is None else found.high
    return min(found.ratio, max(low, least)), max(found.ratio, min(high, most))
