"""The composition view: what is drawn and said is what was put into the study, and silence where nothing is shown."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cosmati.explorer.composition_figures import alone_figure, matrix_figure
from cosmati.explorer.composition_page import joint_rows, parts_view, state_of
from cosmati.explorer.palette import PAGE
from cosmati.records.study import Prediction, Registration, StudyRecord
from tests.explorer.test_composition_view import parts
from tests.study.oracles import log_quality, study


def cells_of(record: StudyRecord, measure: str = "speed-up") -> dict[tuple[str, str], dict[str, str]]:
    """The matrix's numbers by pair, from its CSV."""
    figure = matrix_figure(parts_view(record, "seconds", measure), PAGE)  # type: ignore[arg-type]
    assert figure is not None
    return {(row["part"], row["with"]): row for row in csv.DictReader(io.StringIO(figure.csv))}


def test_the_matrix_has_gains_and_interactions_that_were_put_in() -> None:
    cells = cells_of(parts(both=1.2 * 1.1 * 1.15))
    assert float(cells["A", "A"]["speed-up"]) == pytest.approx(1.2, rel=0.02)
    assert float(cells["B", "B"]["speed-up"]) == pytest.approx(1.1, rel=0.02)
    assert float(cells["A", "B"]["speed-up"]) == pytest.approx(1.15, rel=0.02)
    assert cells["A", "B"]["shown"] == "better"


@pytest.mark.parametrize(
    ("both", "words", "sign"),
    [(1.5, "Shown to help each other: both.", "▲"), (1.2, "Shown to get in each other's way: both.", "▼")],
)
def test_what_is_shown_is_said_and_marked_by_more_than_colour(both: float, words: str, sign: str) -> None:
    view = parts_view(parts(both=both), "seconds", "speed-up")
    assert words in view.findings
    figure = matrix_figure(view, PAGE)
    assert figure is not None
    texts = [one["text"] for one in figure.plot["layout"]["annotations"]]
    assert [text for text in texts if text.startswith(sign)]


def test_nothing_is_said_to_differ_where_nothing_is_shown() -> None:
    silent = parts(both=1.2 * 1.1)
    cells = cells_of(silent)
    assert cells["A", "B"]["shown"] == "no difference shown"
    one = parts_view(parts(both=1.5, seeds=(0,)), "seconds", "speed-up")
    assert {gain.state for gain in one.gains} == {"none shown"}
    assert not any("Shown to" in text or "is shown to be" in text for text in one.findings)
    figure = matrix_figure(one, PAGE)
    assert figure is not None
    assert not [note for note in figure.plot["layout"]["annotations"] if "▲" in note["text"] or "▼" in note["text"]]


def test_by_difference_every_pair_is_measured() -> None:
    lost = {"baseline": log_quality(), "a": log_quality(-0.2), "b": log_quality(0.01), "both": log_quality(-0.1)}
    record = study(lost, methods={"a": ("A",), "b": ("B",), "both": ("A", "B")})
    assert cells_of(record)["A", "B"]["shown"] == "not measured"
    cells = cells_of(record, "difference")
    assert float(cells["A", "B"]["difference"]) == pytest.approx(-0.1 - (-0.2 + 0.01), abs=1e-6)
    assert float(cells["A", "A"]["difference"]) == pytest.approx(-0.2, abs=1e-6)


def test_pairs_without_an_arm_are_named_and_what_to_add_counts_shown_gains_alone() -> None:
    view = parts_view(parts(both=1.5, c=1.15), "seconds", "speed-up")
    assert {frozenset(pair) for pair in view.missing} == {frozenset("AC"), frozenset("BC")}
    assert view.advice[0].startswith("To baseline, add next: A (about 1.2")
    assert parts_view(parts(both=1.5, seeds=(0,)), "seconds", "speed-up").advice == ()


def test_screening_and_registered_are_told_apart() -> None:
    record = parts(both=1.5)
    assert "This is a screening" in parts_view(record, "seconds", "speed-up").findings[-1]
    made = Registration("f", (Prediction("a", "baseline", "seconds", 1.1),), "2026-01-01T00:00:00+00:00", "0" * 64, 1)
    view = parts_view(replace(record, registration=made), "seconds", "speed-up")
    assert "Registered before the runs, at p < 0.01: A. All else here is a screening, at p < 0.05." in view.findings[-1]
    many = parts_view(replace(record, registration=replace(made, num_tests=5)), "seconds", "speed-up").findings[-1]
    assert "Registered before the runs: A. So many tests are a screening, as is all else here, at p < 0.05." in many
    by_step = parts_view(replace(record, registration=made), "step", "speed-up").findings[-1]
    assert "or not by steps" in by_step
    by_difference = parts_view(replace(record, registration=made), "seconds", "difference").findings[-1]
    assert by_difference.endswith("The study's registered predictions are of speed-ups.")


def test_bars_run_from_no_effect_to_the_gain_with_finite_ends() -> None:
    far = {"baseline": log_quality(), "far": log_quality(0.3), "near": log_quality(0.02), "bad": log_quality(-0.3)}
    record = study(far, methods={"far": ("Far",), "near": ("Near",), "bad": ("Bad",)})
    for measure in ("speed-up", "difference"):
        view = parts_view(record, "seconds", measure)  # type: ignore[arg-type]
        figure = alone_figure(view, PAGE)
        json.dumps(figure.plot, allow_nan=False)
        (trace,) = figure.plot["data"]
        drawn = [base + length for base, length in zip(trace["base"], trace["x"], strict=True)]
        values = [gain.value for gain in reversed(view.gains) if gain.value is not None]
        assert drawn == pytest.approx(values)
        assert all(math.isfinite(end) and end >= -1e-9 for end in trace["error_x"]["array"])
        assert all(math.isfinite(end) and end >= -1e-9 for end in trace["error_x"]["arrayminus"])


def test_names_that_plotly_would_read_stay_text() -> None:
    record = parts(both=1.5)
    evil = {"A": "<b>A</b>", "B": "<img src=x>"}
    arms = tuple(replace(arm, methods=tuple(evil.get(one, one) for one in arm.methods)) for arm in record.arms)
    view = parts_view(replace(record, arms=arms), "seconds", "speed-up")
    for figure in (alone_figure(view, PAGE), matrix_figure(view, PAGE)):
        assert figure is not None
        text = json.dumps(figure.plot)
        assert "<b>" not in text
        assert "<img" not in text


def test_a_study_without_runs_or_parts_has_an_empty_view() -> None:
    bare = parts_view(study({"baseline": log_quality(), "x": log_quality(0.1)}), "seconds", "speed-up")
    assert bare.gains == bare.joint == ()
    assert matrix_figure(bare, PAGE) is None
    assert joint_rows(bare) == []


def test_two_arms_of_one_part_have_a_bar_each_named_with_their_settings() -> None:
    gains = {"weak": 1.2, "strong": 1.6, "b": 1.3, "pair": 1.6 * 1.3}
    arms = {"baseline": log_quality()} | {arm: log_quality(0.1 * math.log(gain)) for arm, gain in gains.items()}
    methods = {"weak": ("A(1)",), "strong": ("A(2)",), "b": ("B",), "pair": ("A(2)", "B")}
    record = study(arms, methods=methods)
    view = parts_view(record, "seconds", "speed-up")
    assert [(one.part, one.arm) for one in view.gains] == [("A(2)", "strong"), ("B", "b"), ("A(1)", "weak")]
    assert len(alone_figure(view, PAGE).plot["data"][0]["x"]) == 3
    cells = cells_of(record)
    assert set(cells) == {("A(2)", "A(2)"), ("B", "B"), ("A(2)", "B")}, "the pair's own settings"
    assert float(cells["A(2)", "B"]["speed-up"]) == pytest.approx(1.0, rel=0.02)
    assert view.missing == ()


def test_advice_for_the_baseline_says_nothing_of_pairs() -> None:
    """It has no part, so a part of it makes no pair, whichever were measured."""
    (first, *_) = parts_view(parts(both=1.5), "seconds", "speed-up").advice
    assert first.startswith("To baseline, add next: A (about 1.20×, as alone), then B (about 1.1")
    assert "pair" not in first


def rough(gain: float, key: int, size: float, num_lost: int = 0) -> Callable[[float, int], float]:
    """Quality of an arm so many times as fast, with noise; the first seeds diverge."""
    draws = np.random.default_rng([key, 5]).normal(0.0, size, (5, 4))

    def quality(budget: float, seed: int) -> float:
        place = (0.25, 0.5, 0.75, 1.0).index(budget)
        return math.nan if seed < num_lost else 0.9 + 0.1 * math.log(gain * budget) + draws[seed, place]

    return quality


def test_a_difference_that_luck_gives_among_many_arms_is_not_shown() -> None:
    """Its p-value alone is below 0.05, and Holm's, of twelve arms, isn't."""
    names = [f"p{k}" for k in range(12)]
    arms = {"baseline": rough(1.0, 0, 0.002)} | {name: rough(1.0, k, 0.002) for k, name in enumerate(names, 380)}
    record = study(arms, methods={name: (name.upper(),) for name in names})
    raw = {}
    for name in names:  # by scipy, from the runs themselves, all at the largest budget
        gaps = [arms[name](1.0, seed) - arms["baseline"](1.0, seed) for seed in range(5)]
        raw[name] = stats.ttest_1samp(gaps, 0.0).pvalue
    lucky = min(raw, key=lambda name: raw[name])
    assert raw[lucky] < 0.05 < 12 * raw[lucky], "what this test is about"
    gains = {one.arm: one for one in parts_view(record, "step", "difference").gains}
    assert not (gains[lucky].low or 0) <= 0 <= (gains[lucky].high or 0)
    assert gains[lucky].state == "none shown"
    assert f"p = {12 * raw[lucky]:.2f} adjusted for 12 comparisons" in gains[lucky].text


@pytest.mark.parametrize("lost", ["x", "baseline"])
def test_no_difference_is_shown_where_many_runs_of_either_diverged(lost: str) -> None:
    arms = {"baseline": rough(1.0, 1, 0.0003), "x": rough(1.5, 2, 0.0003)}
    record = study(arms, methods={"x": ("X",)})
    (gain,) = parts_view(record, "step", "difference").gains
    assert gain.state == "better"
    gains = {"baseline": 1.0, "x": 1.5}
    fewer = study(arms | {lost: rough(gains[lost], 1 + (lost == "x"), 0.0003, num_lost=1)}, methods={"x": ("X",)})
    (gain,) = parts_view(fewer, "step", "difference").gains
    assert gain.state == "none shown", "a fifth of its runs"
    assert gain.n == 4


def test_a_gain_says_where_it_is_read_off() -> None:
    """An arm that never gets to the baseline's best is read at its own, and said to be."""
    record = study(
        {"baseline": log_quality(), "fast": log_quality(0.05), "slow": log_quality(-0.05)},
        methods={"fast": ("Fast",), "slow": ("Slow",)},
    )
    gains = {one.arm: one for one in parts_view(record, "seconds", "speed-up").gains}
    assert (gains["fast"].at_own_best, gains["slow"].at_own_best) == (False, True)
    assert "lesser" not in gains["fast"].text
    assert gains["slow"].text.endswith(", at the lesser of both bests")


@pytest.mark.parametrize(("both", "state"), [(0.05, "better"), (0.012, "worse")])
def test_a_pair_by_difference_is_judged_against_a_sum_and_not_a_product(both: float, state: str) -> None:
    """Differences are far below 1 whichever way they point: what does nothing is 0."""
    arms = {"baseline": log_quality(), "a": log_quality(0.01), "b": log_quality(0.01), "both": log_quality(both)}
    noisy = {
        name: lambda b, s, f=f, k=k: f(b, s) + 1e-4 * math.sin(9 * k * (s + 1))
        for k, (name, f) in enumerate(arms.items())
    }
    record = study(noisy, methods={"a": ("A",), "b": ("B",), "both": ("A", "B")})  # type: ignore[arg-type]
    view = parts_view(record, "step", "difference")
    (pair,) = view.pairs
    assert state_of(pair) == state
    words = {"better": "Shown to help each other: both.", "worse": "Shown to get in each other's way: both."}
    assert words[state] in view.findings
    assert cells_of(record, "difference")["A", "B"]["shown"] == state


def test_pairs_stand_below_the_diagonal() -> None:
    """The axis of rows runs downwards, so a cell below the diagonal has the larger row."""
    figure = matrix_figure(parts_view(parts(both=1.5), "seconds", "speed-up"), PAGE)
    assert figure is not None
    (trace,) = figure.plot["data"]
    places = set(zip(trace["x"], trace["y"], strict=True))
    assert places == {(0, 0), (1, 1), (0, 1)}
    first, last = figure.plot["layout"]["yaxis"]["range"]
    assert first > last
    hovers = dict(zip(zip(trace["x"], trace["y"], strict=True), trace["customdata"], strict=True))
    assert hovers[0, 1].startswith("both: ")
    boxes = {
        (round((one["x0"] + one["x1"]) / 2), round((one["y0"] + one["y1"]) / 2))
        for one in figure.plot["layout"]["shapes"]
    }
    assert boxes == places == {(one["x"], one["y"]) for one in figure.plot["layout"]["annotations"]}
