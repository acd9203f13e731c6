"""Parts on the page: the tables' figures are the study's, and the picture has every arm that gets there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cosmati.explorer.composition_view import composition_view, gains_figure
from cosmati.explorer.palette import PAGE
from cosmati.explorer.report import render_report
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import SpeedUp, interaction, speed_up_at_equal_quality
from cosmati.study.statistics import Estimate
from tests.explorer.samples import demo_study
from tests.study.oracles import log_quality, study

pytestmark = pytest.mark.long


def test_tables_have_the_studys_figures() -> None:
    record = demo_study()
    view = composition_view(record)
    assert [row[:2] for row in view.singles] == [
        ("LabelSmoothing", "label smoothing"),
        ("ProgressiveResizing", "progressive"),
        ("LayerFreezing", "freezing"),
    ]
    (row,) = view.joint
    found = interaction(record, "composed", ["label smoothing", "progressive"])
    assert isinstance(found, Estimate)
    assert row[:2] == ("composed", "LabelSmoothing × ProgressiveResizing")
    assert f"{found.value:.3g}"[:4] in row[2]


@pytest.mark.parametrize(
    ("both", "verdict"),
    [
        (1.2 * 1.1 * 1.1, "they help each other, p < 0.001"),
        (1.2 * 1.1 / 1.1, "they get in each other's way, p < 0.001"),
        (1.2 * 1.1, "no interaction is shown, p = "),
    ],
)
def test_verdicts_say_what_was_put_in(both: float, verdict: str) -> None:
    (row,) = composition_view(parts(both=both)).joint
    assert row[3].startswith(verdict)
    alone = composition_view(parts(both=both, seeds=(0,))).joint
    assert alone[0][3] == "no interaction is shown", "one seed shows no spread"
    unreached = composition_view(parts(both=0.8)).joint[0]
    assert unreached[3] == "not measured"
    assert ": they get in each other's way, p < 0.001" in unreached[4], "which quality at the largest budget says"
    assert verdict.partition(",")[0] in row[4]


def test_verdicts_say_for_how_many_they_are_adjusted() -> None:
    view = composition_view(parts(both=1.5, again=1.5))
    assert [row[3] for row in view.joint] == ["they help each other, p < 0.001 adjusted for 2 comparisons"] * 2
    page = render_report(title="t", studies=[parts(both=1.5, again=1.5)])
    assert "Verdicts are a screening: p &lt; 0.05, adjusted for all 2 of them (Holm)" in page
    assert "adjusted for" not in composition_view(parts(both=1.5)).rule


def test_no_verdict_where_a_part_is_unknown() -> None:
    """A and B don't interact, and nothing is known of C, which gives 1.8."""
    view = composition_view(parts(both=1.2 * 1.1, abc=1.2 * 1.1 * 1.8))
    (row,) = [row for row in view.joint if row[0] == "abc"]
    assert row == (
        "abc",
        "A × B × C",
        "Nothing is known of C alone: run an arm with each alone, over baseline.",
        "not measured",
        "—",
        "—",
    )
    assert "adjusted" not in view.rule


def test_what_to_add_next_is_said_with_its_basis() -> None:
    view = composition_view(parts(both=1.5, c=1.15))
    assert view.advice == ("To both, add next: C (about 1.15×, as alone: no pair with it is measured).",)


def parts(seeds: Sequence[int] = (0, 1, 2, 3, 4), **gains: float) -> StudyRecord:
    """Two parts, 1.2 and 1.1 times as fast, and other arms."""

    def noisy(gain: float) -> Callable[[float, int], float]:
        exact = log_quality(0.1 * math.log(gain))
        return lambda budget, seed: exact(budget, seed) + 0.0002 * math.sin(50 * gain + 31 * budget * (seed + 1))

    names = {"a": ("A",), "b": ("B",), "c": ("C",), "both": ("A", "B"), "again": ("A", "B"), "abc": ("A", "B", "C")}
    made = {"baseline": log_quality()} | {arm: noisy(gain) for arm, gain in ({"a": 1.2, "b": 1.1} | gains).items()}
    return study(made, seeds=seeds, methods={arm: names.get(arm, ()) for arm in made})


def test_the_picture_has_every_arm_that_gets_there() -> None:
    record = demo_study()
    figure = gains_figure(record, PAGE)
    (trace,) = figure.plot["data"]
    drawn = dict(zip(trace["y"], trace["x"], strict=True))
    for arm in ("label smoothing", "progressive", "freezing", "composed"):
        found = speed_up_at_equal_quality(record, arm)
        assert drawn.get(arm) == (found.ratio if isinstance(found, SpeedUp) else None)
    assert "aa" not in drawn
    assert trace["x"] == sorted(trace["x"])
    low, high = (10**end for end in figure.plot["layout"]["xaxis"]["range"])
    for ratio, up, down in zip(trace["x"], trace["error_x"]["array"], trace["error_x"]["arrayminus"], strict=True):
        assert low * 0.999 <= ratio - down <= ratio <= ratio + up <= high * 1.001
    assert figure.csv.count("\n") == len(drawn) + 1


def test_open_ends_and_single_seeds_are_drawn_inside_the_picture() -> None:
    record = study({"baseline": log_quality(), "far": log_quality(0.3), "one": log_quality(0.01)}, seeds=(0,))
    (trace,) = gains_figure(record, PAGE).plot["data"]
    assert all(math.isfinite(x) for key in ("array", "arrayminus") for x in trace["error_x"][key])
    empty = replace(record, runs=())
    assert composition_view(empty).singles == ()


def test_an_arm_that_is_far_faster_or_slower_lies_inside_the_picture() -> None:
    flat = {name: log_quality() for name in ("baseline", "cheap", "dear")}
    record = study(flat, pace={"cheap": 1 / 40, "dear": 60.0})
    figure = gains_figure(record, PAGE)
    (trace,) = figure.plot["data"]
    drawn = dict(zip(trace["y"], trace["x"], strict=True))
    assert drawn["cheap"] > 30
    assert drawn["dear"] < 1 / 50
    low, high = (10**end for end in figure.plot["layout"]["xaxis"]["range"])
    assert all(low < ratio < high for ratio in trace["x"])
    ticks = figure.plot["layout"]["xaxis"]["tickvals"]
    assert ticks == sorted(ticks)
    assert min(ticks) < 0.1
    assert max(ticks) > 10


@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_study_without_parts_says_nothing_of_them(num_parts: int) -> None:
    record = study({"baseline": log_quality(), "a": log_quality(0.01)}, methods={"a": ("<b>",)[:num_parts]})
    view = composition_view(record)
    assert view.joint == view.advice == ()
    page = render_report(title="t", studies=[record])
    assert "Parts, alone and together" in page
    assert "<b>" not in page
