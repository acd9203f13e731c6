"""What the page of a comparison shows: sentences, figures and tables of two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from cosmati.explorer.compared_run import ComparedRun, TimedPoints
from cosmati.explorer.differences import (
    DiffKind,
    FactGroup,
    agreement,
    bits_sentence,
    diff_lines,
    first_difference,
    groups_of,
    values_sentence,
)
from cosmati.explorer.figures import Figure, averaged, axis_title, base_layout, csv_text
from cosmati.explorer.palette import Palette
from cosmati.explorer.run_view import Points
from cosmati.explorer.wording import amount, number, time_unit
from cosmati.store.summary import RunSummary

MAX_MEASURES = 6
_MAX_POINTS = 1000
_OUTCOMES = ("steps", "rows", "tokens", "flops", "seconds", "cost")


@dataclass(frozen=True)
class CompareView:
    """Two runs beside one another."""

    a: ComparedRun
    b: ComparedRun

    @property
    def is_one(self) -> bool:
        """Whether both are the same run."""
        return self.a.summary.key == self.b.summary.key

    @cached_property
    def groups(self) -> tuple[FactGroup, ...]:
        """The facts by kind."""
        return groups_of(self.a.facts, self.b.facts, is_strict=self.a.summary.kind == self.b.summary.kind)

    @property
    def sentence(self) -> str:
        """In what they differ first."""
        return "A and B are the same run." if self.is_one else first_difference(self.groups)

    @cached_property
    def diff(self) -> list[tuple[DiffKind, str]]:
        """The recipes as a unified diff."""
        return diff_lines(self.a.recipe_text, self.b.recipe_text)

    @property
    def bits(self) -> list[str]:
        """What the records say of whether both are the same to the last bit."""
        names = [name for name in self.a.weights if name in self.b.weights]
        found = [bits_sentence(name, agreement(self.a.weights[name], self.b.weights[name])) for name in names]
        if not any(found):
            found.append(
                "Both have no digest of their weights at the same step, so nothing says whether their bits agree."
            )
        found.append(values_sentence("Their logged losses", agreement(self.a.losses, self.b.losses)))
        shared = [name for name in self.a.curves if name in self.b.curves and name != "loss"]
        for name in shared[:MAX_MEASURES]:
            ours, theirs = dict(self.a.curves[name]), dict(self.b.curves[name])
            found.append(values_sentence(f"Their values of {name}", agreement(ours, theirs)))
        return [text for text in found if text]

    @property
    def outcome_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Final qualities and costs: name, both, B less A, and B over A."""
        a, b = self.a.summary, self.b.summary
        rows = [("status", a.status, b.status, "", "")]
        if a.quality_name and a.quality_name == b.quality_name:
            rows.append(_row(a.quality_name, a.quality, b.quality))
        rows += [_row(name, a.metrics[name], b.metrics[name]) for name in _shared_metrics(a, b)]
        values = [(name, getattr(a, name), getattr(b, name)) for name in _OUTCOMES]
        return rows + [_row(name, ours, theirs) for name, ours, theirs in values if (ours, theirs) != (None, None)]

    @property
    def caution(self) -> str:
        """What a reader must not conclude."""
        a, b = self.a.summary, self.b.summary
        words = "One run of each isn't evidence: another seed can turn the difference round."
        if a.kind == b.kind == "study" and a.path == b.path and a.arm != b.arm:
            words += f" The study {a.study} compares {a.arm} and {b.arm} over its seeds, with intervals."
        if not (a.hardware and b.hardware):
            words += " It isn't recorded what both ran on, so their times and costs don't compare."
        elif a.hardware != b.hardware:
            words += " Their hardware differs, so their times and costs don't compare."
        return words


def _shared_metrics(a: RunSummary, b: RunSummary) -> list[str]:
    return [name for name in a.metrics if name in b.metrics and name != a.quality_name]


def _row(name: str, a: float | None, b: float | None) -> tuple[str, str, str, str, str]:
    words = [_value(name, one) for one in (a, b)]
    if a is None or b is None:
        return name, words[0], words[1], "–", "–"
    gap = b - a
    sign = "+" if gap > 0 else "−" if gap < 0 else ""
    ratio = f"{number(b / a, 4)}×" if a and math.isfinite(b / a) else "–"
    return name, words[0], words[1], f"{sign}{_value(name, abs(gap))}" if gap else "equal", ratio


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "seconds":
        return amount(value, "seconds")
    return f"{value:,}" if isinstance(value, int) else number(value, 5)


def compare_figures(view: CompareView, palette: Palette) -> dict[str, Figure]:
    """Return two figures for each measure, by steps and by training time; those that both have, losses at the head."""
    ours, theirs = view.a.curves, view.b.curves
    shared = [name for name in ours if name in theirs]
    names = sorted(shared or dict.fromkeys((*ours, *theirs)), key=lambda name: name != "loss")
    found = {}
    for place, name in enumerate(names[:MAX_MEASURES]):
        by_step = (ours.get(name, ()), theirs.get(name, ()))
        if not any(value is not None for points in by_step for _, value in points):
            continue
        found[f"both-{place}"] = pair_figure(name, *by_step, palette)
        timed = (view.a.timed.get(name, ()), view.b.timed.get(name, ()))
        if all(timed):
            found[f"both-{place}-time"] = pair_figure(name, *timed, palette, is_timed=True)
    return found


def pair_figure(
    name: str, a: TimedPoints | Points, b: TimedPoints | Points, palette: Palette, *, is_timed: bool = False
) -> Figure:
    """Draw one measure of both runs over their steps, or over the seconds of their training."""
    unit, length = time_unit(max(one[-1][0] for one in (a, b) if one)) if is_timed else ("", 1.0)
    axis = f"training time ({unit})" if is_timed else "steps done"
    place_text = f"%{{x:.4g}} {unit}" if is_timed else "step %{x:,}"
    traces = []
    for label, points, colour, dash in (("A", a, palette.series[3], "solid"), ("B", b, palette.accent, "dash")):
        x, y = averaged([(place, value) for place, value in points if value is not None], _MAX_POINTS)
        trace = {
            "type": "scatter",
            "mode": "lines" if len(x) > 30 else "lines+markers",
            "name": label,
            "x": [place / length for place in x] if is_timed else x,
            "y": y,
            "line": {"color": colour, "width": 2, "dash": dash},
            "marker": {"symbol": "circle" if label == "A" else "diamond", "size": 8},
            "hovertemplate": f"{label}, {place_text}: %{{y:.5g}}<extra></extra>",
        }
        traces.append(trace)
    layout = base_layout(palette, height=320)
    layout["xaxis"] |= {"title": axis_title(axis), "rangemode": "tozero"}
    layout["yaxis"] |= {"title": axis_title(name)}
    rows = [[label, place, value] for label, points in (("A", a), ("B", b)) for place, value in points]
    over = "training time" if is_timed else "steps"
    return Figure(
        {"data": traces, "layout": layout},
        f"{name} of both runs over their {over}",
        csv_text(["run", "seconds" if is_timed else "step", name], rows),
    )
