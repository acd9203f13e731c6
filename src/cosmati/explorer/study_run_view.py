"""What a page shows of one run of a study: beside the other seeds of its arm, and the baseline's of the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure, axis_title, base_layout, csv_text, plotly_text, thinned
from cosmati.explorer.palette import Palette
from cosmati.explorer.views import TableRow
from cosmati.explorer.wording import amount, number, quality_text, time_unit
from cosmati.records.run import TIME_PARTS
from cosmati.records.study import ArmRecord, EvaluationPoint, StudyRecord, StudyRun

_MAX_OTHERS = 40
"""Other seeds that are drawn."""


@dataclass(frozen=True)
class StudyRunView:
    """One run of a study.

    Attributes:
        study: All of it.
        arm: The run's.
        run: It.
        peers: Runs of its arm at its budget, itself included, by seed.
        paired: The baseline's runs at its budget by seed; empty where it's the baseline's own.
    """

    study: StudyRecord
    arm: ArmRecord
    run: StudyRun
    peers: tuple[StudyRun, ...]
    paired: dict[int, StudyRun]

    @cached_property
    def finite(self) -> list[StudyRun]:
        """The peers that have a quality, best first."""
        found = [run for run in self.peers if math.isfinite(run.final.quality)]
        return sorted(found, key=lambda run: run.final.quality, reverse=self.study.higher_is_better)

    @property
    def twin(self) -> StudyRun | None:
        """The baseline's run of the same budget and seed."""
        return self.paired.get(self.run.seed)

    @property
    def is_baseline(self) -> bool:
        """Whether the arm is the study's baseline."""
        return self.arm.name == self.study.baseline_arm

    @property
    def place(self) -> str:
        """Its place among the seeds of its arm, in a sentence."""
        run, study = self.run, self.study
        if not math.isfinite(run.final.quality):
            why = "It failed" if run.error else f"Its {study.quality_name} isn't finite: it diverged"
            return f"{why}, so it has no place among its arm's seeds."
        if len(self.peers) == 1:
            return "It's the only seed of its arm at this budget, so nothing says how much of it is luck."
        if len(self.finite) == 1:
            what = "diverged or failed" if any(one.error for one in self.peers) else "diverged"
            return f"Of the {len(self.peers)} seeds of its arm at this budget all others {what}."
        qualities = [one.final.quality for one in self.finite]  # the best first
        num_equal = qualities.count(run.final.quality) - 1
        others = f", as {num_equal} other{'s' * (num_equal > 1)}" if num_equal else ""
        place = f"number {1 + qualities.index(run.final.quality)} by {study.quality_name}{others}"
        words = f"Of {len(qualities)} seeds of its arm at this budget it is {place}"
        ends = [quality_text(study, one.final.quality) for one in (self.finite[0], self.finite[-1])]
        return f"{words}; they reach from {ends[0]} to {ends[1]}."

    @property
    def against_baseline(self) -> str:
        """How it stands to the baseline of the same seed, in a sentence; empty where there's none."""
        twin, study = self.twin, self.study
        if self.is_baseline:
            return "Its arm is the study's baseline."
        if twin is None:
            return f"The baseline has no run of seed {self.run.seed} at this budget."
        gap = self.run.final.quality - twin.final.quality
        if not math.isfinite(gap):
            return "Of it and the baseline of the same seed one diverged or failed, so there's no difference."
        if gap == 0:
            return f"The baseline of the same seed has the same {study.quality_name}."
        better = "better" if (gap > 0) == study.higher_is_better else "worse"
        gap_text = quality_text(study, abs(gap))
        return (
            f"The baseline of the same seed has {quality_text(study, twin.final.quality)}: this run is {gap_text} "
            f"{better}. One seed of each isn't evidence; the study's page has all of them, with intervals."
        )

    def seed_rows(self) -> list[tuple[StudyRun, StudyRun | None, str, str, str]]:
        """Return for each seed the run, the baseline's, both qualities and their difference, in words."""
        rows = []
        for one in self.peers:
            twin = self.paired.get(one.seed)
            gap = math.nan if twin is None else one.final.quality - twin.final.quality
            theirs = "–" if twin is None else _quality(self.study, twin.final.quality)
            sign = "+" if gap > 0 else ""
            better = "better" if (gap > 0) == self.study.higher_is_better else "worse"
            gap_text = f"{sign}{number(gap)}{f', {better}' if gap else ''}" if math.isfinite(gap) else "–"
            rows.append((one, twin, _quality(self.study, one.final.quality), theirs, gap_text))
        return rows


def _quality(study: StudyRecord, value: float) -> str:
    return quality_text(study, value) if math.isfinite(value) else "not finite"


def study_run_view(study: StudyRecord, arm: str, budget: float, seed: int) -> StudyRunView:
    """Return the view of one run.

    Raises:
        RunError: the study has no such run.
    """
    peers = sorted((run for run in study.runs if (run.arm, run.budget) == (arm, budget)), key=lambda run: run.seed)
    run = next((one for one in peers if one.seed == seed), None)
    record = next((one for one in study.arms if one.name == arm), None)
    if run is None or record is None:
        msg = f"The study {study.name} has no run of {arm} at budget {budget:g} and seed {seed}. Choose one of its own."
        raise RunError(msg)
    theirs = [one for one in study.runs if one.arm == study.baseline_arm != arm and one.budget == budget]
    return StudyRunView(study, record, run, tuple(peers), {one.seed: one for one in theirs})


def cards_of(view: StudyRunView, cost: float | None) -> list[tuple[str, str, str]]:
    """Return the figures that stand large: name, value, and what it's of."""
    final, study = view.run.final, view.study
    cards = [
        (study.quality_name, _quality(study, final.quality), "after the last step"),
        ("training time", amount(final.seconds, "seconds"), "evaluation isn't in it"),
        ("steps", f"{final.step:,}", _pace(final)),
    ]
    if cost is not None:
        cards.append(("cost", number(cost, 3), f"at {study.price_per_hour} an hour"))
    return cards


def _pace(final: EvaluationPoint) -> str:
    if final.seconds <= 0:
        return ""
    parts = [f"{number(final.step / final.seconds)} a second"]
    if final.tokens:
        parts.append(f"{number(final.tokens / final.seconds)} tokens a second")
    elif final.rows:
        parts.append(f"{number(final.rows / final.seconds)} rows a second")
    return ", ".join(parts)


def part_rows(view: StudyRunView) -> list[TableRow]:
    """Return each part of the run's wall clock, with its share, and the same of the baseline's of the same seed."""
    parts, theirs = view.run.seconds_by_part, view.twin.seconds_by_part if view.twin else {}
    total = sum(parts.values())
    names = [name for name in TIME_PARTS if name in parts] + sorted(set(parts) - set(TIME_PARTS))
    return [
        (
            name,
            amount(parts[name], "seconds"),
            f"{100 * parts[name] / total:.1f} %" if total else "–",
            amount(theirs[name], "seconds") if name in theirs else "–",
        )
        for name in names
    ]


def point_rows(view: StudyRunView) -> list[TableRow]:
    """Return each evaluation: step, time, quality, rows, tokens."""
    return [
        (
            f"{point.step:,}",
            amount(point.seconds, "seconds"),
            _quality(view.study, point.quality),
            f"{point.rows:,}" if point.rows else "–",
            f"{point.tokens:,}" if point.tokens else "–",
        )
        for point in view.run.points
    ]


def study_run_figures(view: StudyRunView, palette: Palette) -> dict[str, Figure]:
    """Return the figures: its evaluations among the other seeds', and final qualities seed by seed."""
    found = {"curve": curve_figure(view, palette)}
    if len(view.finite) > 1 or view.twin is not None:
        found["seeds"] = seeds_figure(view, palette)
    return found


def curve_figure(view: StudyRunView, palette: Palette) -> Figure:
    """Draw quality against training time: the other seeds of the arm, the baseline of the same seed, and the run."""
    runs = [(one, plotly_text(f"seed {one.seed}"), palette.muted, 1.0, 0.4, "solid") for one in _others(view)]
    if view.twin is not None:
        runs.append((view.twin, "baseline, same seed", palette.ink, 2.0, 1.0, "dash"))
    runs.append((view.run, "this run", palette.accent, 3.0, 1.0, "solid"))
    unit, length = time_unit(max(one.final.seconds for one, *_ in runs))
    traces, rows = [], []
    for one, name, colour, width, opacity, dash in runs:
        points = [point for point in thinned(one.points or (one.final,)) if math.isfinite(point.quality)]
        is_few = len(points) <= 12
        is_other = one is not view.run and one is not view.twin
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if is_few else "lines",
            "name": f"other seeds of {plotly_text(view.arm.name)}" if is_other else name,
            "x": [point.seconds / length for point in points],
            "y": [point.quality for point in points],
            "customdata": [point.step for point in points],
            "line": {"color": colour, "width": width, "dash": dash},
            "marker": {"size": 5 if is_other else 8},
            "opacity": opacity,
            "hovertemplate": f"{name}, step %{{customdata:,}}: %{{y:.4g}}<extra></extra>",
        }
        if is_other:
            trace |= {"legendgroup": "others", "showlegend": one is runs[0][0]}
        traces.append(trace)
        rows += [[one.arm, one.seed, point.step, point.seconds, point.quality] for point in points]
    layout = base_layout(palette, height=380)
    layout["xaxis"] |= {"title": axis_title(f"training time ({unit})"), "rangemode": "tozero"}
    layout["yaxis"] |= {"title": axis_title(f"{view.study.quality_name} {view.study.unit}".strip())}
    label = f"{view.study.quality_name} of {view.run.run_id} over its training time, among the other seeds of its arm"
    header = ["arm", "seed", "step", "seconds", "quality"]
    return Figure({"data": traces, "layout": layout}, label, csv_text(header, rows))


def _others(view: StudyRunView) -> Sequence[StudyRun]:
    return [one for one in view.peers if one is not view.run][:_MAX_OTHERS]


def seeds_figure(view: StudyRunView, palette: Palette) -> Figure:
    """Draw final qualities, the arm above its baseline, with a line between those of one seed."""
    above, below = plotly_text(view.arm.name), "baseline"
    traces: list[dict[str, object]] = []
    rows: list[list[object]] = []
    pairs = [(one, view.paired.get(one.seed)) for one in view.finite]
    lines_x: list[float | None] = []
    lines_y: list[str | None] = []
    for one, twin in pairs:
        if twin is not None and math.isfinite(twin.final.quality):
            lines_x += [twin.final.quality, one.final.quality, None]
            lines_y += [below, above, None]
    if lines_x:
        line = {"color": palette.rule, "width": 1.5}
        traces.append(
            {"type": "scatter", "mode": "lines", "x": lines_x, "y": lines_y, "line": line, "hoverinfo": "skip"}
        )
    theirs = [twin for twin in view.paired.values() if math.isfinite(twin.final.quality)]
    for name, runs, colour in ((below, theirs, palette.ink), (above, view.finite, palette.series[3])):
        if not runs:
            continue
        is_here = [one.seed == view.run.seed for one in runs]
        marker = {
            "color": [palette.accent if here else colour for here in is_here],
            "size": [15 if here else 9 for here in is_here],
            "symbol": ["diamond" if here else "circle" for here in is_here],
            "line": {"color": palette.surface, "width": 1},
        }
        trace = {
            "type": "scatter",
            "mode": "markers",
            "x": [one.final.quality for one in runs],
            "y": [name] * len(runs),
        }
        hover = f"{name}, seed %{{customdata}}: %{{x:.5g}}<extra></extra>"
        traces.append(trace | {"customdata": [one.seed for one in runs], "marker": marker, "hovertemplate": hover})
        rows += [[one.arm, one.seed, one.final.quality] for one in runs]
    layout = base_layout(palette, height=220) | {"showlegend": False}
    layout["xaxis"] |= {"title": axis_title(f"{view.study.quality_name} {view.study.unit}".strip())}
    layout["yaxis"] |= {"type": "category", "showgrid": False, "range": [-0.5, 1.5 if view.paired else 0.5]}
    label = f"Final {view.study.quality_name} of each seed of {view.arm.name}, and of the baseline's"
    return Figure({"data": traces, "layout": layout}, label, csv_text(["arm", "seed", "quality"], rows))
