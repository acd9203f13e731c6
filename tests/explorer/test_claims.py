"""Claims name their opponent, large figures stand for shown differences alone, predictions beside what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from cosmati.explorer import wording
from cosmati.explorer.report import render_report
from cosmati.explorer.wording import claims_of, noise_sentences, opponent_text, prediction_rows
from cosmati.records.study import Prediction, Registration, SearchRecord, StudyRecord
from tests.study.oracles import log_quality, study
from tests.study.test_checks import searched


def record(**searches: SearchRecord | None) -> StudyRecord:
    made = study({"baseline": log_quality(), "fast": log_quality(0.05), "plain": log_quality(-0.1)})
    arms = [replace(arm, search=searches.get(arm.name)) for arm in made.arms]
    arms[2] = replace(arms[2], opponent="plain", source="the paper's table 3")
    return replace(made, arms=tuple(arms))


@pytest.mark.parametrize(
    ("searches", "text"),
    [
        ({}, "an opponent whose settings weren't searched"),
        ({"fast": searched()}, "an opponent whose settings weren't searched"),
        (
            {"baseline": searched(), "fast": searched(0.02)},
            "a tuned opponent (5 trials, 703 steps, as many as the arm's)",
        ),
        ({"baseline": searched()}, "a tuned opponent (5 trials, 703 steps), at the baseline's settings"),
        (
            {"baseline": searched(counts=((0.25, 3), (1.0, 1))), "fast": searched()},
            "an opponent that wasn't searched as the arm was (4 trials and 700 steps against the arm's 5 and 703)",
        ),
        (
            {"baseline": searched(steps=800, rows=4), "fast": searched()},
            "a tuned opponent (5 trials as the arm's, 1,403 steps against 703)",
        ),
    ],
)
def test_a_claim_says_how_strong_its_opponent_is(searches: dict[str, SearchRecord], text: str) -> None:
    made = record(**searches)
    assert opponent_text(made, "fast") == text
    (claim,) = [one for one in claims_of(made) if one.arm == "fast"]
    assert f"), over {text}." in claim.sentence


def test_a_plain_opponent_is_cited() -> None:
    made = record(baseline=searched(), fast=searched())
    assert opponent_text(made, "fast", "plain") == "a plain opponent (the paper's table 3)"
    published = "a tuned opponent (5 trials, 703 steps), at published settings (the paper's table 3)"
    assert opponent_text(made, "plain") == published
    text = "a plain opponent (the paper's table 3), at settings that weren't searched"
    assert opponent_text(record(), "fast", "plain") == text


def wobbling(gain: float, size: float) -> Callable[[float, int], float]:
    return lambda budget, seed: log_quality(gain)(budget, seed) + size * (seed - 1)


def test_a_large_figure_stands_only_for_a_difference_that_is_shown() -> None:
    arms = {
        "baseline": log_quality(),
        "fast": log_quality(0.05),
        "slow": log_quality(-0.05),
        "same": wobbling(0.001, 0.01),
        "hint": wobbling(0.02, 0.004),
    }
    claims = {one.arm: one for one in claims_of(study(arms, seeds=(0, 1, 2)))}
    shown = {name: (one.verdict, one.figure) for name, one in claims.items()}
    assert shown["fast"] == ("faster", "1.65×")
    assert shown["slow"][0] == "slower"
    assert shown["slow"][1].endswith("×")
    assert shown["same"] == ("no difference shown", "—")
    assert shown["hint"][1] == "—"
    assert "×" in claims["hint"].sentence
    assert {one.figure for one in claims_of(study(arms, seeds=(0,)))} == {"—"}


def test_more_seeds_than_anybody_runs_are_not_counted() -> None:
    arms = {"baseline": log_quality(), "same": wobbling(0.001, 0.01)}
    for needed, text in ((2092, "takes more than 100 seeds"), (101, "more than 100 "), (100, "takes 100 seeds")):
        with mock.patch.object(wording, "seeds_for", return_value=needed):
            assert text in noise_sentences(study(arms, seeds=(0, 1, 2)))[-1]


def test_predictions_stand_beside_what_came() -> None:
    predictions = (
        Prediction("fast", "baseline", "step", 1.5),
        Prediction("fast", "plain", "seconds", 6.0),
        Prediction("plain", "baseline", "seconds", 1.1),
    )
    committed = Registration("headlines", predictions, "2026-11-22T10:11:12+00:00", "abcd" * 16)
    made = replace(record(), registration=committed)
    rows = prediction_rows(made)
    assert [(who, least, verdict) for who, least, _, verdict in rows] == [
        ("fast over baseline, by steps", "≥ 1.50×", "met"),
        ("fast over plain, by training time", "≥ 6.00×", "not met"),
        ("plain over baseline, by training time", "≥ 1.10×", "not met"),
    ]
    assert rows[0][2].startswith("1.65× (")
    assert rows[0][2].endswith("p < 0.001 adjusted for 3 comparisons")
    assert "plain never reaches accuracy 0.9" in rows[2][2]
    page = render_report(title="t", studies=[made])
    assert "as the family <em>headlines</em> (SHA-256 <code>abcdabcdabcd</code>)" in page
    assert "<td>≥ 6.00×</td>" in page
    assert "Predicted before the runs, on" in page
    assert "Predicted before the runs, on" not in render_report(title="t", studies=[record()])
