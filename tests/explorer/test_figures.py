"""Colours, figures and static pictures."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from cosmati.explorer.class_schedule import class_schedule_svg
from cosmati.explorer.drawing import heat_map_svg, linear_ticks, mixed, tradeoff_svg
from cosmati.explorer.figures import (
    MAX_LINE_POINTS,
    averaged,
    breakdown_figure,
    csv_text,
    interval_bars,
    learning_figure,
    log_ticks,
    mean_seconds_by_part,
    thinned,
    tradeoff_figure,
)
from cosmati.explorer.palette import DARK, LIGHT, PAGE, Palette, css_variables
from cosmati.explorer.run_figures import (
    contribution_figure,
    elided,
    heat_map_figure,
    line_figure,
    schedule_figure,
    shares_figure,
    wrapped,
)
from cosmati.explorer.wording import amount, claims_of, noise_sentence, noise_sentences, number
from cosmati.records.study import EvaluationPoint, Prediction, Registration, StudyRecord
from cosmati.study.comparison import SpeedUp, comparisons, speed_up_at_equal_quality
from cosmati.study.curves import CurvePoint
from cosmati.study.statistics import Estimate, best_of, seeds_needed
from tests.explorer.samples import CLASSES, REGIONS, demo_facts, demo_study
from tests.study.oracles import log_quality, study

Array = NDArray[np.float64]
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "full": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour: str) -> Array:
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: Array) -> Array:
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = matrix @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_contrast_is_enough(palette: Palette) -> None:
    for ground in (palette.paper, palette.surface, palette.denied):
        for text in (palette.ink, palette.muted, palette.accent, palette.good, palette.bad):
            assert contrast(text, ground) >= 4.5
    for ground in (palette.paper, palette.surface):
        assert all(contrast(colour, ground) >= 3 for colour in palette.series)
    for share in np.linspace(0, 1, 9):
        assert contrast(palette.ink, mixed(palette.denied, palette.full, float(share))) >= 4.5


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("vision", VISIONS)
def test_series_stay_apart(palette: Palette, vision: str) -> None:
    seen = [lab(VISIONS[vision] @ linear(colour)) for colour in (*palette.series, palette.ink)]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 17


def test_page_palette_names_what_the_themes_define() -> None:
    names = {f"var({name})" for name in css_variables(LIGHT)}
    assert css_variables(LIGHT).keys() == css_variables(DARK).keys()
    assert {*PAGE.series, PAGE.ink, PAGE.rule, PAGE.full, PAGE.denied} <= names


def test_tradeoff_figure_holds_the_curve_and_its_csv() -> None:
    record = study({"baseline": log_quality(), "fast": log_quality(0.05)})
    figure = tradeoff_figure(record, LIGHT, axis="step")
    line, trace = (trace for trace in figure.plot["data"] if trace["name"] == "fast")
    assert trace["x"] == [250.0, 500.0, 750.0, 1000.0]
    assert (line["mode"], trace["mode"], line["legendgroup"]) == ("lines", "markers", trace["legendgroup"])
    assert len(line["x"]) == 1 + 3 * 13, "with places between the budgets, where it may bend"
    assert min(abs(np.log(line["x"]) - math.log(500.0))) < 1e-12
    straight = 0.95 + 0.1 * np.log(np.array(line["x"]) / 1000.0)
    np.testing.assert_allclose(line["y"], straight, rtol=1e-9, err_msg="its quality is linear in the logarithm")
    assert trace["y"] == pytest.approx([0.95 + 0.1 * math.log(b) for b in (0.25, 0.5, 0.75, 1.0)])
    assert figure.plot["layout"]["shapes"][0]["y0"] == pytest.approx(0.9)
    rows = list(csv.DictReader(io.StringIO(figure.csv)))
    assert len(rows) == 8
    assert float(rows[-1]["quality"]) == pytest.approx(0.95)
    half = float(rows[-1]["quality_high"]) - float(rows[-1]["quality"])
    assert trace["error_y"]["array"][-1] == pytest.approx(half)


def test_breakdown_is_the_mean_of_the_largest_budget() -> None:
    record = demo_study()
    parts = mean_seconds_by_part(record, "progressive")
    assert parts["backward"] == pytest.approx(0.5 * 720)
    assert list(parts) == ["data", "forward", "backward", "optimizer", "evaluation"]
    bars = {trace["name"]: trace["x"][2] * 60 for trace in breakdown_figure(record, LIGHT).plot["data"]}
    assert bars == pytest.approx(parts)


def test_intervals_of_time_are_not_mirrored() -> None:
    point = CurvePoint(1.0, Estimate(36.0, 8.1, 138.0, 5), Estimate(2.0, 1.9, 2.2, 5), 5, 0)
    bars = interval_bars([point], "position", 2.0, "red")
    assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(51.0)], [pytest.approx(13.95)])
    bars = interval_bars([point], "quality", 1.0, "red")
    assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(0.2)], [pytest.approx(0.1)])


def test_diverged_runs_have_no_share_in_the_breakdown() -> None:
    record = demo_study()
    lost = [run for run in record.runs if run.arm == "progressive" and run.budget == 1.0][:2]
    runs = tuple(
        replace(run, final=replace(run.final, quality=math.nan), seconds_by_part={}) if run in lost else run
        for run in record.runs
    )
    found = mean_seconds_by_part(replace(record, runs=runs), "progressive")
    assert found == pytest.approx(mean_seconds_by_part(record, "progressive"))


def test_the_study_s_own_words_are_escaped_in_hover_text() -> None:
    record = replace(study({"baseline": log_quality(), "fast": log_quality(0.05)}), quality_name="<b>q", unit="<i>u")
    shown = [text for trace in tradeoff_figure(record, LIGHT).plot["data"] for text in trace.get("text", ())]
    assert shown
    assert not any("<b>q" in text or "<i>u" in text for text in shown)


def test_heat_map_has_every_cell() -> None:
    figure = heat_map_figure(demo_facts(), "main", DARK)
    trace = figure.plot["data"][0]
    assert trace["z"][2] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert trace["text"][2] == ["–", "–", "0.25", "1", "1"]
    assert len(figure.csv.splitlines()) == 1 + len(CLASSES) * len(REGIONS)


def test_names_that_look_alike_keep_their_places() -> None:
    facts = demo_facts()
    names = tuple(f"{'a' * 60}{number}{'b' * 60}" for number in range(len(CLASSES)))
    renamed = dict(zip(CLASSES, names, strict=True))
    facts = replace(
        facts,
        classes=names,
        weight={renamed[name]: row for name, row in facts.weight.items()},
        decision={renamed[name]: row for name, row in facts.decision.items()},
    )
    plot = heat_map_figure(facts, "main", LIGHT).plot
    assert len(set(plot["layout"]["yaxis"]["ticktext"])) == 1
    assert plot["data"][0]["y"] == [0, 1, 2], "the last one has no weight"
    assert all(name in plot["data"][0]["customdata"][i][0] for i, name in enumerate(names[:3]))


def test_shares_are_of_norms_or_else_of_rows() -> None:
    facts = demo_facts()
    trace = shares_figure(facts, LIGHT).plot["data"][0]
    assert [sum(column) for column in zip(*trace["z"], strict=True)] == pytest.approx([1.0] * len(REGIONS))
    unlogged = replace(facts, totals=tuple(replace(t, norm_sum=0.0, share=0.0) for t in facts.totals))
    figure = shares_figure(unlogged, LIGHT)
    assert "rows" in figure.label
    assert figure.plot["data"][0]["z"][0] == pytest.approx([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3])


def test_the_schedule_counts_every_microbatch() -> None:
    schedule = tuple(("x",) * (step % 3) + ("y",) for step in range(1001))
    figure = schedule_figure(schedule, ("x", "y"), LIGHT)
    x, y = figure.plot["data"]
    assert (sum(x["y"]), sum(y["y"])) == (sum(step % 3 for step in range(1001)), 1001)
    assert len(y["y"]) <= 64
    assert "in 16 steps" in figure.label


def test_more_classes_than_colours_differ_by_pattern_and_dash() -> None:
    names = tuple(f"c{i:02}" for i in range(12))
    looks = [
        (trace["marker"]["color"], trace["marker"]["pattern"]["shape"])
        for trace in schedule_figure((names,), names, LIGHT).plot["data"]
    ]
    assert len(set(looks)) == 12


def test_long_lines_are_means_over_windows() -> None:
    steps, values = averaged([(step, float(step % 2)) for step in range(1000)], 100)
    assert len(steps) == 100
    assert steps[-1] == 999
    assert set(values) == {0.5}
    assert averaged([(3, 1.0), (4, 2.0)], 100) == ([3, 4], [1.0, 2.0])
    figure = line_figure("loss", ((1, 0.5), (2, None), (3, 0.25)), LIGHT)
    assert figure.plot["data"][0]["y"] == [0.5, 0.25]
    assert figure.csv.splitlines() == ["step,loss", "1,0.5", "2,", "3,0.25"]


@pytest.mark.parametrize(
    "name", ["head", "near_output", "region_0_of_the_model", "x" * 200, "a b-c/d.e" * 9, "訓練" * 30]
)
def test_labels_fit(name: str) -> None:
    assert len(elided(name)) <= 26
    lines = wrapped(name)
    assert "".join(lines) == elided(name, 33)
    assert all(0 < len(line) <= 11 for line in lines)


def test_contribution_and_learning_lines() -> None:
    figure = contribution_figure(demo_facts(), "middle", CLASSES, LIGHT)
    assert [trace["name"] for trace in figure.plot["data"]] == list(CLASSES[:3])
    lines = learning_figure(demo_study(2), LIGHT).plot["data"]
    assert lines[0]["y"].count(None) == 12
    diverged = [EvaluationPoint(s, float(s), math.nan) for s in range(1, 4)]
    record = demo_study(2)
    broken = replace(record, runs=(replace(record.runs[0], points=tuple(diverged)), *record.runs[1:]))
    assert None in learning_figure(broken, LIGHT).plot["data"][0]["y"][:1]


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    points = [EvaluationPoint(s, float(s), 0.5) for s in range(1, 5001)]
    kept = thinned(points)
    assert len(kept) <= MAX_LINE_POINTS + 1
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thinned(points[:3]) == points[:3]
    assert thinned([]) == []


def test_an_empty_text_is_an_empty_field() -> None:
    assert csv_text(["a", "b"], [["", None], ["x", ""]]) == "a,b\r\n,\r\nx,\r\n"


def test_csv_text_disarms_formulas() -> None:
    assert csv_text(["a", "b"], [["=1+1", -2.5]]) == "a,b\r\n'=1+1,-2.5\r\n"
    assert csv_text(["a"], [["\t=1+1"]]) == "a\r\n'\t=1+1\r\n"
    assert csv_text(["=a"], [["one\rtwo"]]) == '\'=a\r\n"one\rtwo"\r\n'


@pytest.mark.parametrize(("low", "high"), [(180, 1000), (1, 9.5), (3, 90000), (0.2, 0.3)])
def test_log_ticks_lie_inside_and_are_few(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)
    assert 1 <= len(ticks) <= 14


def test_linear_ticks_are_round() -> None:
    assert linear_ticks(0.851, 0.923) == pytest.approx([0.86, 0.88, 0.9, 0.92])
    assert linear_ticks(-3, 12) == pytest.approx([0, 5, 10])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_svgs_are_well_formed_and_name_everything(theme: str) -> None:
    record = demo_study()
    palette = LIGHT if theme == "light" else DARK
    tradeoff = tradeoff_svg(record, theme)  # type: ignore[arg-type]
    root = ElementTree.fromstring(tradeoff)
    words = " ".join(root.itertext())
    assert all(arm.name in words for arm in record.arms)
    found = speed_up_at_equal_quality(record, "composed")
    assert isinstance(found, SpeedUp)
    assert found.low is not None
    assert f"{number(found.ratio)} times as fast" in words
    assert f"95 % interval {number(found.low)}" in words
    heat = ElementTree.fromstring(heat_map_svg(demo_facts(), theme))  # type: ignore[arg-type]
    words = " ".join(heat.itertext())
    assert all(name in words for name in (*CLASSES, *REGIONS, "opening", "main", "0.25", "reject"))
    assert palette.paper in tradeoff
    assert not re.search(r"href|https?://(?!www\.w3\.org)|<script", tradeoff)


def test_svg_escapes_and_survives_few_points() -> None:
    one = study({"baseline": log_quality(), "<b>&": log_quality(0.1)}, budgets=[1.0], seeds=[0])
    words = " ".join(ElementTree.fromstring(tradeoff_svg(one)).itertext())
    assert "<b>&" in words
    none = replace(one, runs=())
    assert "No finished runs" in tradeoff_svg(none)


def test_labels_of_the_svg_do_not_cover_each_other() -> None:
    record = study({name: log_quality() for name in ("baseline", "a", "b", "c", "d")})
    root = ElementTree.fromstring(tradeoff_svg(record))
    heights = sorted(float(one.get("y", 0)) for one in root.iter() if one.text in {"baseline", "a", "b", "c", "d"})
    assert min(after - before for before, after in itertools.pairwise(heights)) >= 18


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (0.912345, "0.912"),
        (-0.5, "−0.500"),
        (3e12, "3.00e+12"),
        (math.inf, "∞"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert number(value) == text


def test_amounts_have_units() -> None:
    assert amount(90.0, "seconds") == "90.0\u00a0s"
    assert amount(900.0, "seconds") == "15.0\u00a0min"
    assert amount(9000.0, "seconds") == "2.50\u00a0h"
    assert amount(100.0, "step") == "100 steps"


def verdicts(record: StudyRecord) -> dict[str, str]:
    return {claim.arm: claim.verdict for claim in claims_of(record)}


def test_claims_say_what_was_shown_and_no_more() -> None:
    arms = {
        "baseline": log_quality(),
        "fast": log_quality(0.05),
        "same": log_quality(),
        "slow": lambda b, s: log_quality(-0.05)(b, s) + (0.06 if b == 1.0 else 0.0),
        "worse": log_quality(-0.05),
    }
    record = study(arms, pace={"same": 1.0, "slow": 1.3})
    assert verdicts(record) == {
        "fast": "faster",
        "same": "no difference shown",
        "slow": "slower",
        "worse": "slower",
    }
    worse = next(claim for claim in claims_of(record) if claim.arm == "worse")
    assert worse.figure == "0.607×"
    own = "worse reached its own best accuracy (0.8500) in 165 % of"
    assert worse.sentence.startswith(f"worse never reaches accuracy 0.9; its best is 0.85. {own}")
    far = claims_of(study({"baseline": log_quality(), "far": log_quality(-0.3)}))[0]
    assert (far.verdict, far.figure) == ("slower", "≤ 0.250×")
    assert "open to 0.250" in far.sentence
    assert verdicts(study(arms, seeds=[0]))["fast"] == "one seed"
    assert "isn't measured" in noise_sentence(record)


def test_p_values_are_adjusted_for_all_comparisons() -> None:
    alone = study({"baseline": log_quality(), "hint": wobbling(0.02)}, seeds=range(3))
    prediction = Registration(
        "f", (Prediction("hint", "baseline", "seconds", 1.1),), "2026-11-22T10:11:12+00:00", "a", 1
    )
    alone = replace(alone, registration=prediction)
    (found,) = comparisons(alone)
    assert isinstance(found.found, SpeedUp)
    assert (found.p_value, found.level) == (found.found.p_value, 0.01)
    assert verdicts(alone)["hint"] == (
        "faster" if found.p_value is not None and found.p_value < 0.01 else "perhaps faster"
    )
    many = study({"baseline": log_quality(), **{f"hint {k}": wobbling(0.02) for k in range(6)}}, seeds=range(3))
    family = comparisons(many)
    assert {one.level for one in family} == {0.05}
    for one in family:
        assert isinstance(one.found, SpeedUp)
        assert one.found.p_value is not None
        assert one.p_value == pytest.approx(min(1.0, 6 * one.found.p_value))
    assert ("Found by screening" in claims_of(many)[0].sentence) == family[0].is_shown


def test_what_luck_shows_is_said() -> None:
    record = study({"baseline": log_quality(), **{f"arm {k}": wobbling(0.01 * k) for k in (1, 2, 3)}}, seeds=range(3))
    noise, luck = noise_sentences(record)
    assert noise == noise_sentence(record)
    errors = sorted(one.found.error or 0.0 for one in comparisons(record) if isinstance(one.found, SpeedUp))
    assert f"Of 3 arms that do nothing the best would show about {number(best_of(3, errors[1]))}× here." in luck
    needed = seeds_needed(1.1, errors[1] * math.sqrt(3), 0.0, 3, 0.05, 0.8)
    assert f"at p < 0.05, adjusted, in 80% of studies takes {needed} seeds with such runs; this study has 3." in luck
    assert len(noise_sentences(study({"baseline": log_quality(), "fast": log_quality(0.05)}, seeds=[0]))) == 1


def wobbling(size: float) -> Callable[[float, int], float]:
    return lambda b, s: log_quality(size)(b, s) + 0.004 * (s - 1)


def test_the_class_schedule_escapes_its_names() -> None:
    picture = class_schedule_svg([[0, 1]], ("<b>x</b>", "a & b"))
    words = " ".join(ElementTree.fromstring(picture).itertext())
    assert "<b>x</b>, 50.0%" in words
    assert "a & b, 50.0%" in words
