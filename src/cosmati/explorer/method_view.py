"""What studies say of a method: one finding for each arm that has it, and a picture of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cosmati.explorer.figures import Figure, axis_title, base_layout, csv_text, log_ticks, plotly_text
from cosmati.explorer.method_words import method_key
from cosmati.explorer.palette import Palette
from cosmati.explorer.run_figures import elided
from cosmati.explorer.wording import AXIS_NAMES, claim_of, estimate_text, interval_text, number, opponent_text, p_text
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import NotReached, comparisons, difference_at_equal
from cosmati.study.curves import Axis, available_axes
from cosmati.study.statistics import Estimate

SHOWN = ("faster", "slower")
_LEAST, _MOST = 1 / 16, 16.0


@dataclass(frozen=True)
class ArmFinding:
    """What one study says of one arm that adds something to its baseline.

    Attributes:
        study: Name of the study.
        path: Of its folder in the store.
        arm: Of the study.
        parts: Keys of all that the arm adds; of one part it's evidence about that part, of more about them together.
        names: The same as the study writes them.
        verdict: In a word or two.
        sentence: With figures, opponent and n.
        ratio: Speed-up, None where there's none.
        low: Lower end of its interval, None at one seed, 0 where it's open.
        high: Upper end, infinite where it's open.
        n: Seeds behind it.
        p_text: Its p-value and what that is adjusted for, empty where there's none.
        difference: Difference in quality at equal cost in words, with its interval, or why there's none.
        opponent: How strong the baseline is.
        hardware: In words.
        standing: `registered`, `screening` or both, with the level.
    """

    study: str
    path: str
    arm: str
    parts: tuple[str, ...]
    names: tuple[str, ...]
    verdict: str
    sentence: str
    ratio: float | None
    low: float | None
    high: float | None
    n: int
    p_text: str
    difference: str
    opponent: str
    hardware: str
    standing: str

    @property
    def is_alone(self) -> bool:
        """Whether the arm adds nothing else."""
        return len(self.parts) == 1


def arm_findings(study: StudyRecord, path: str, axis: Axis) -> tuple[ArmFinding, ...] | None:
    """Return what a study says of each arm that adds something; None where it has no count of the axis."""
    if axis not in available_axes(study):
        return None
    arms = {arm.name: arm for arm in study.arms}
    findings = []
    for one in comparisons(study, axis=axis):
        names = arms[one.arm].methods
        if not names:
            continue
        claim, found = claim_of(study, one, axis), one.found
        quoted = None if isinstance(found, NotReached) else found
        standing = " ".join(["registered"] * one.is_registered + ["screening"] * one.is_screening)
        findings.append(
            ArmFinding(
                study=study.name,
                path=path,
                arm=one.arm,
                parts=tuple(dict.fromkeys(method_key(name) for name in names)),
                names=names,
                verdict=claim.verdict,
                sentence=claim.sentence,
                ratio=quoted.ratio if quoted else None,
                low=quoted.low if quoted else None,
                high=quoted.high if quoted else None,
                n=quoted.n if quoted else 0,
                p_text="" if one.p_value is None else p_text(one.p_value, one.num_tests),
                difference=_difference_text(study, difference_at_equal(study, one.arm, axis=axis)),
                opponent=opponent_text(study, one.arm),
                hardware=study.hardware,
                standing=f"{standing}, p < {one.level}",
            )
        )
    return tuple(findings)


def _difference_text(study: StudyRecord, found: Estimate | NotReached) -> str:
    """Return by how much an arm's quality is higher or lower, and whether that is better; the interval the same way."""
    if isinstance(found, NotReached) or found.value == 0:
        return estimate_text(found)
    is_better = found.value > 0
    sign = 1.0 if is_better else -1.0
    ends = [None if end is None else sign * end for end in (found.low, found.high)]
    low, high = ends if is_better else ends[::-1]
    way = "higher" if is_better == study.higher_is_better else "lower"
    return (
        f"{way} by {number(abs(found.value))}, {'better' if is_better else 'worse'} "
        f"({interval_text(low, high, found.n)})"
    )


def verdict_counts(findings: Sequence[ArmFinding]) -> tuple[tuple[str, int], ...]:
    """Return how often each verdict was reached, what is shown first."""
    verdicts = [one.verdict for one in findings]
    order = [*SHOWN, *sorted(set(verdicts) - set(SHOWN))]
    return tuple((verdict, verdicts.count(verdict)) for verdict in order if verdict in verdicts)


def forest_figure(findings: Sequence[ArmFinding], axis: Axis, palette: Palette) -> Figure | None:
    """Draw a row for each finding with a speed-up: filled alone, open in a composition; None where there's none."""
    found = [one for one in reversed(findings) if one.ratio]
    if not found:
        return None
    ratios = [one.ratio or 1.0 for one in found]
    ends = [end for one in found for end in (one.low, one.high) if end is not None and _LEAST <= end <= _MOST]
    least, most = min([0.9, *ratios, *ends]) / 1.08, max([1.11, *ratios, *ends]) * 1.08
    low = [max(least, ratio if one.low is None else one.low) for one, ratio in zip(found, ratios, strict=True)]
    high = [min(most, ratio if one.high is None else one.high) for one, ratio in zip(found, ratios, strict=True)]
    inks = {"faster": palette.good, "slower": palette.bad}
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": ratios,
        "y": list(range(len(found))),
        "marker": {
            "size": 11,
            "symbol": ["square" if one.is_alone else "diamond-open" for one in found],
            "color": [inks.get(one.verdict, palette.muted) for one in found],
            "line": {"width": 2, "color": [inks.get(one.verdict, palette.muted) for one in found]},
        },
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [end - ratio for end, ratio in zip(high, ratios, strict=True)],
            "arrayminus": [ratio - end for end, ratio in zip(low, ratios, strict=True)],
            "color": palette.muted,
            "thickness": 1.5,
            "width": 5,
        },
        "customdata": [_hover(one) for one in found],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }
    layout = base_layout(palette, height=92 + 40 * len(found))
    layout["margin"]["t"] = 10
    layout["xaxis"] |= _ratio_axis(least, most, f"speed-up, by {AXIS_NAMES[axis]}")
    labels = [f"{plotly_text(elided(one.study, 20))}<br>{plotly_text(elided(one.arm, 20))}" for one in found]
    layout["yaxis"] |= {"tickvals": trace["y"], "ticktext": labels, "showgrid": False}
    layout["yaxis"] |= {"range": [-0.7, len(found) - 0.3]}
    line = {"color": palette.ink, "width": 1.5, "dash": "dash"}
    layout["shapes"] = [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1, "line": line}]
    label = f"Speed-ups by {AXIS_NAMES[axis]} of {len(found)} arms with their 95 % intervals"
    return Figure({"data": [trace], "layout": layout}, label, findings_csv(findings, axis))


def _hover(one: ArmFinding) -> str:
    text = f"{one.study}: {one.arm}\n{one.verdict}, {one.ratio or 1.0:.3g}×\n{one.standing}"
    return plotly_text(text).replace("\n", "<br>")


def _ratio_axis(least: float, most: float, title: str) -> dict[str, Any]:
    few = [tick for tick in (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0) if least <= tick <= most]
    ticks = log_ticks(least, most) if most > 12 or least < 0.08 else few
    return {
        "type": "log",
        "title": axis_title(title),
        "tickvals": ticks,
        "ticktext": [f"{tick:.3g}×" for tick in ticks],
        "tickangle": 0,
        "range": [math.log10(least), math.log10(most)],
    }


def findings_csv(findings: Sequence[ArmFinding], axis: Axis) -> str:
    """Return findings as CSV."""
    rows = []
    for one in findings:
        figures = [axis, one.verdict, one.ratio, one.low, one.high, one.n, one.standing, one.hardware]
        rows.append([one.study, one.path, one.arm, "; ".join(one.names), *figures])
    ends = ["axis", "verdict", "speed_up", "low", "high", "n", "standing", "hardware"]
    return csv_text(["study", "folder", "arm", "parts", *ends], rows)


def interval_words(one: ArmFinding) -> str:
    """Return a finding's interval and n, a dash where it has none."""
    if one.ratio is None:
        return "—"
    return interval_text(-math.inf if one.low == 0.0 else one.low, one.high, one.n)
