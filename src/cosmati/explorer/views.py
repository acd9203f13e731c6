"""What the report page shows, worked out before any HTML: one frozen view a section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cosmati.errors import RunError
from cosmati.explorer.composition_view import CompositionView, composition_view, gains_figure
from cosmati.explorer.figures import (
    Figure,
    axis_scale,
    breakdown_figure,
    learning_figure,
    mean_seconds_by_part,
    tradeoff_figure,
)
from cosmati.explorer.palette import PAGE, Palette
from cosmati.explorer.wording import (
    AXIS_NAMES,
    Claim,
    amount,
    claims_of,
    estimate_text,
    interval_text,
    noise_sentences,
    number,
    prediction_rows,
    quality_text,
    ratio_interval_text,
    ratio_text,
)
from cosmati.records.governance import GovernanceFacts
from cosmati.records.run import TIME_PARTS, RunRecord
from cosmati.records.study import ChecklistItem, StudyRecord
from cosmati.study.checks import DATA_SHARE, checks_of, data_shares, shares_text
from cosmati.study.comparison import (
    NotReached,
    SpeedUp,
    area_between,
    crossings,
    difference_at_equal,
    speed_ups_at_equal_quality,
)
from cosmati.study.curves import Axis, available_axes, tradeoff_curve
from cosmati.study.divergence import left_out
from cosmati.study.hardware import is_extrapolated
from cosmati.study.inference import inference_costs

NUM_LEVELS = 31
TableRow = tuple[str, ...]


@dataclass(frozen=True)
class Level:
    """One position of the quality line: the quality, its text and a speed-up row for each arm."""

    quality: float
    text: str
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class StudyView:
    """All that the page shows of one study. `anchor` starts its figures' ids and its sections' addresses."""

    anchor: str
    record: StudyRecord
    claims: tuple[Claim, ...]
    noise: tuple[str, ...]
    axes: tuple[tuple[Axis, str], ...]
    levels: dict[Axis, tuple[Level, ...]]
    start: dict[Axis, int]
    points: tuple[TableRow, ...]
    comparisons: tuple[TableRow, ...]
    composition: CompositionView
    parts: tuple[TableRow, ...]
    time_notes: tuple[str, ...]
    inference: tuple[TableRow, ...]
    checks: tuple[ChecklistItem, ...]
    predictions: tuple[TableRow, ...]


def levels_of(study: StudyRecord, axis: Axis) -> tuple[tuple[Level, ...], int]:
    """Return the positions of the quality line, worst number first, and the index of the baseline's best."""
    curves = [tradeoff_curve(study, arm.name, axis=axis).points for arm in study.arms]
    means = [point.quality.value for points in curves for point in points]
    base = [point.quality.value for point in tradeoff_curve(study, study.baseline_arm, axis=axis).points]
    if not base:
        return (), 0
    best = (max if study.higher_is_better else min)(base)
    low, high = min(means), max(means)
    step = (high - low) / (NUM_LEVELS - 1)
    grid = [low + step * index for index in range(NUM_LEVELS)] if step > 0 else []
    below = [quality for quality in grid if quality < best - step / 4]
    above = [quality for quality in grid if quality > best + step / 4]
    targets, start = [*below, None, *above], len(below)
    others = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    found = [(arm, speed_ups_at_equal_quality(study, arm, targets, axis=axis), left_out(study, arm)) for arm in others]
    levels = []
    for index, target in enumerate(targets):
        text = quality_text(study, best if target is None else target)
        rows = tuple(_speed_up_row(study, arm, ratios[index], axis, left) for arm, ratios, left in found)
        levels.append(
            Level(
                best if target is None else target,
                text + (", the baseline's best" if target is None else ""),
                rows,
            )
        )
    return tuple(levels), start


def _speed_up_row(
    study: StudyRecord, arm: str, found: SpeedUp | NotReached, axis: Axis, left: tuple[int, int]
) -> TableRow:
    """Return an arm's row; where it's over fewer seeds than the baseline has, with the quality of those."""
    if isinstance(found, NotReached):
        return arm, "not reached", "—", found.reason
    mark = "≤ " if found.is_at_least else ""
    price = study.price_per_hour if axis == "seconds" else None
    cost = f", {number(found.arm_needs / 3600 * price)} $" if price else ""
    over = f", without {left[0]} of {left[1]} seeds, at {quality_text(study, found.quality)}" if left[0] else ""
    return arm, mark + amount(found.arm_needs, axis) + cost, ratio_text(found), ratio_interval_text(found) + over


def study_view(study: StudyRecord, anchor: str, *, is_first_alone: bool = False) -> StudyView:
    """Work out everything that the page says about `study`.

    Args:
        study: of which the page is.
        anchor: that its ids start with.
        is_first_alone: whether levels of the first axis alone are worked out; `with_axis` has the others.
    """
    axes = available_axes(study) if study.runs else ()
    found = {axis: levels_of(study, axis) for axis in (axes[:1] if is_first_alone else axes)}
    others = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    return StudyView(
        anchor=anchor,
        record=study,
        claims=claims_of(study),
        noise=noise_sentences(study),
        axes=tuple((axis, AXIS_NAMES[axis]) for axis in axes),
        levels={axis: levels for axis, (levels, _) in found.items()},
        start={axis: start for axis, (_, start) in found.items()},
        points=tuple(row for arm in study.arms for row in _point_rows(study, arm.name)),
        comparisons=tuple(_comparison_row(study, arm) for arm in others),
        composition=composition_view(study),
        parts=tuple(row for arm in study.arms for row in part_rows(study, arm.name)),
        time_notes=time_notes(study),
        inference=_inference_rows(study),
        checks=checks_of(study),
        predictions=prediction_rows(study),
    )


def with_axis(view: StudyView, axis: Axis) -> StudyView:
    """Return the view that opens with another axis; levels of that one alone are worked out, where they aren't yet.

    Raises:
        RunError: the study has no such axis.
    """
    axes = dict(view.axes)
    if axis not in axes:
        names = ", ".join(axes) or "none, for no run has finished"
        raise RunError(f"The study {view.record.name} has no axis {axis!r}. Choose one of: {names}.")
    if axis == view.axes[0][0] and axis in view.levels:
        return view
    levels, start = levels_of(view.record, axis)
    ordered = ((axis, axes[axis]), *(one for one in view.axes if one[0] != axis))
    return replace(view, axes=ordered, levels={axis: levels}, start={axis: start})


def _point_rows(study: StudyRecord, arm: str) -> list[TableRow]:
    rows: list[TableRow] = []
    for point in tradeoff_curve(study, arm).points:
        quality = point.quality
        budget, time = f"{point.budget:g}", amount(point.position.value, "seconds")
        interval = interval_text(quality.low, quality.high, point.n, 4)
        rows.append((arm, budget, time, quality_text(study, quality.value), interval, str(point.num_diverged)))
    return rows


def _comparison_row(study: StudyRecord, arm: str) -> TableRow:
    crossed = ", ".join(amount(at, "seconds") for at in crossings(study, arm)) or "none"
    at_time = estimate_text(difference_at_equal(study, arm))
    has_steps = "step" in available_axes(study)
    at_steps = estimate_text(difference_at_equal(study, arm, axis="step")) if has_steps else "–"
    return arm, at_time, at_steps, estimate_text(area_between(study, arm)), crossed


def part_rows(study: StudyRecord, arm: str) -> list[TableRow]:
    """Return an arm's rows of time by part: with the share, and the most that each could give (Amdahl)."""
    parts = mean_seconds_by_part(study, arm)
    total = sum(parts.values())
    # Evaluation counts in no speed-up, so it's no part of what one could give.
    counted = total - parts.get("evaluation", 0.0)
    rows: list[TableRow] = []
    for name, seconds in parts.items():
        most = f"{number(counted / (counted - seconds))}×" if seconds < counted and name != "evaluation" else "—"
        rows.append((arm, name, amount(seconds, "seconds"), f"{100 * seconds / total:.1f} %" if total else "—", most))
    return rows


def time_notes(study: StudyRecord) -> tuple[str, ...]:
    """Return what is to be said of a run's time by part: whose it is, and whether data hold it up."""
    if is_extrapolated(study):
        text = "The runs' time by part is left out: it's of the machine that they ran on, and other hardware shares its"
        return (f"{text} time out otherwise.",)
    shares = data_shares(study)
    if not shares:
        return ("No time by part is on record.",)
    high = {arm: share for arm, share in shares.items() if share >= DATA_SHARE}
    if high:
        text = f"Data hold training up: reading rows and changing them takes {100 * DATA_SHARE:g} % of it or more"
        return (f"{text}: {shares_text(high)}.",)
    most = max(shares, key=lambda arm: shares[arm])
    return (
        f"Data loading isn't the bottleneck: it takes {100 * shares[most]:.1f} % of training time at most ({most}).",
    )


def _inference_rows(study: StudyRecord) -> tuple[TableRow, ...]:
    found = inference_costs(study)
    return tuple(
        (one.arm, f"{number(1e6 * one.seconds_a_row)}\u00a0µs", "1" if one is found[0] else estimate_text(one.ratio))
        for one in found
    )


def study_figures(view: StudyView, palette: Palette = PAGE) -> dict[str, Figure]:
    """Return the study's figures by their id; the tradeoff and learning figures once for each axis with levels."""
    if not view.axes:
        return {}
    figures = {f"{view.anchor}-gains": gains_figure(view.record, palette)}
    if view.parts:
        figures[f"{view.anchor}-breakdown"] = breakdown_figure(view.record, palette)
    for axis in view.levels:
        figures |= axis_figures(view, axis, palette)
    return figures


def axis_figures(view: StudyView, axis: Axis, palette: Palette = PAGE) -> dict[str, Figure]:
    """Return the figures along one axis by their id: tradeoff curves, and learning curves."""
    return {
        f"{view.anchor}-tradeoff-{axis}": tradeoff_figure(view.record, palette, axis=axis),
        f"{view.anchor}-learning-{axis}": learning_figure(view.record, palette, axis=axis),
    }


def live_data(view: StudyView) -> dict[str, Any]:
    """Return what the page's script needs to move the quality line: levels and the unit of each axis."""
    return {
        axis: {
            "start": view.start[axis],
            "title": axis_scale(view.record, axis)[0],
            "levels": [{"quality": one.quality, "text": one.text, "rows": one.rows} for one in levels],
        }
        for axis, levels in view.levels.items()
    }


@dataclass(frozen=True)
class ShownGuarantee:
    """A guarantee as the page shows it; those that differ only in what stands in brackets are shown once."""

    name: str
    holds: bool
    because: str
    members: tuple[str, ...]


MAX_ALIKE = 3


def promises_of(record: RunRecord) -> tuple[ShownGuarantee, ...]:
    """Group a run's guarantees: more than `MAX_ALIKE` of one kind, with one reason, are one line."""
    groups: dict[tuple[str, bool, str], list[str]] = {}
    for one in record.guarantees:
        groups.setdefault((one.name.partition("(")[0], one.holds, one.because), []).append(one.name)
    return tuple(
        promise
        for (kind, holds, because), names in groups.items()
        for promise in (
            [ShownGuarantee(name, holds, because, ()) for name in names]
            if len(names) <= MAX_ALIKE
            else [ShownGuarantee(f"{kind}(…)", holds, because, tuple(names))]
        )
    )


def seconds_rows(record: RunRecord) -> tuple[TableRow, ...]:
    """Return each part of a run's wall clock, with its time and its share."""
    total = sum(record.seconds_by_part.values())
    ordered = [n for n in TIME_PARTS if n in record.seconds_by_part]
    ordered += [n for n in record.seconds_by_part if n not in TIME_PARTS]
    return tuple(
        (name, amount(seconds, "seconds"), f"{100 * seconds / total:.1f} %" if total else "—")
        for name in ordered
        if (seconds := record.seconds_by_part[name])
    )


def decisions_text(facts: GovernanceFacts, phase: str) -> str:
    """Return in words which classes a phase doesn't admit."""
    found: dict[str, list[str]] = {}
    for name in facts.classes:
        if facts.decision[name][phase] != "admit":
            found.setdefault(facts.decision[name][phase], []).append(name)
    words = [f"{decision.capitalize()}: {', '.join(names)}." for decision, names in found.items()]
    return " ".join(words) or "Every class is admitted."
