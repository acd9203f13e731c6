"""Claims name their opponent, large figures stand for shown differences alone, predictions beside what came."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from cosmati.cli.study import summary
from cosmati.explorer import wording
from cosmati.explorer.method_view import arm_findings
from cosmati.explorer.opening import opening_sentences
from cosmati.explorer.report import render_report
from cosmati.explorer.wording import claims_of, noise_sentences, opponent_text, prediction_rows
from cosmati.records.study import Prediction, Registration, SearchRecord, StudyRecord
from tests.study.oracles import log_quality, study
from tests.study.test_checks import LR, searched


def record(**searches: SearchRecord | None) -> StudyRecord:
    made = study({"baseline": log_quality(), "fast": log_quality(0.05), "plain": log_quality(-0.1)})
    arms = [replace(arm, search=searches.get(arm.name)) for arm in made.arms]
    arms[2] = replace(arms[2], opponent="plain", source="the paper's table 3")
    return replace(made, arms=tuple(arms))


@pytest.mark.parametrize(
    ("searches", "text"),
    [
        ({}, "an opponent with no search on record"),
        ({"fast": searched()}, "an opponent with no search on record"),
        (
            {"baseline": searched(dimensions=(LR,)), "fast": searched(dimensions=(LR,))},
            "an opponent of which lr alone was searched (5 trials, 703 steps, as many as the arm's)",
        ),
        (
            {"baseline": searched(), "fast": searched(0.02)},
            "a tuned opponent (5 trials, 703 steps, as many as the arm's)",
        ),
        ({"baseline": searched()}, "a tuned opponent (5 trials, 703 steps), at the baseline's settings"),
        (
            {"baseline": searched(counts=((0.25, 3), (1.0, 1))), "fast": searched()},
            (
                "an opponent that wasn't searched as the arm was (4 trials of 3 settings and 700 steps against the "
                "arm's 5 of 4 and 703)"
            ),
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


def test_settings_that_were_known_before_the_search_are_told() -> None:
    known = [
        replace(one, trials=tuple(replace(trial, is_known=trial.point == 0) for trial in one.trials), by_hand=count)
        for one, count in ((searched(), 10), (searched(0.02), 50))
    ]
    base, fast = known
    both = "were known before the search, found by hand (about 50 trials for fast, about 10 trials for baseline)"
    made = record(baseline=base, fast=fast)
    assert opponent_text(made, "fast").endswith(f"; the best settings of fast and baseline {both}")
    assert both in claims_of(made)[0].sentence
    uncounted = replace(base, by_hand=0)
    assert opponent_text(record(baseline=uncounted, fast=searched()), "fast").endswith(
        "; the best settings of baseline were known before the search"
    )
    assert opponent_text(made, "fast", "plain").endswith("(about 50 trials for fast)")
    # A known point that wasn't chosen is one of many.
    others = replace(base, chosen=1)
    assert "known" not in opponent_text(record(baseline=others, fast=searched()), "fast")


def test_an_arm_that_never_gets_there_says_what_it_did_reach() -> None:
    claims = {one.arm: one for one in claims_of(study({"baseline": log_quality(), "slow": log_quality(-0.05)}))}
    sentence = claims["slow"].sentence
    assert sentence.startswith(
        "slow never reaches accuracy 0.9; its best is 0.85. slow reached its own best accuracy (0.8500) in "
    )
    assert "there" not in sentence


def test_the_summary_says_verdicts() -> None:
    """An arm at 0.6 times is slower, and one that does nothing has no figure without a verdict."""
    arms = {
        "baseline": log_quality(),
        "slow": log_quality(0.1 * math.log(0.6)),
        "same": wobbling(0.001, 0.01),
        "aa": log_quality(),
    }
    lines = summary(study(arms))
    assert [line.partition(". ")[0] for line in lines[:2]] == ["  slow: slower", "  same: no difference shown"]
    assert "0.6" in lines[0]
    assert lines[2].startswith("  Noise floor: baseline against itself")
    assert not any("times as fast" in line for line in lines)


def test_a_plain_opponent_is_cited() -> None:
    made = record(baseline=searched(), fast=searched())
    assert opponent_text(made, "fast", "plain") == "a plain opponent (the paper's table 3)"
    published = "a tuned opponent (5 trials, 703 steps), at published settings (the paper's table 3)"
    assert opponent_text(made, "plain") == published
    text = "a plain opponent (the paper's table 3), at settings with no search on record"
    assert opponent_text(record(), "fast", "plain") == text


def wobbling(gain: float, size: float) -> Callable[[float, int], float]:
    return lambda budget, seed: log_quality(gain)(budget, seed) + size * (seed - 1)


def test_a_large_figure_stands_only_for_a_difference_that_is_shown() -> None:
    arms = {
        "baseline": log_quality(),
        "fast": log_quality(0.05),
        "slow": log_quality(-0.05),
        "same": wobbling(0.001, 0.01),
        "hint": wobbling(0.02, 0.007),
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
    texts = {2092: "takes more than 100 seeds", 101: "more than 100 ", 100: "takes 100 seeds", None: "in more turns"}
    for needed, text in texts.items():
        with mock.patch.object(wording, "seeds_needed", return_value=needed):
            assert text in noise_sentences(study(arms, seeds=(0, 1, 2)))[-1]


@pytest.mark.long
def test_predictions_stand_beside_what_came() -> None:
    predictions = (
        Prediction("fast", "baseline", "step", 1.5),
        Prediction("fast", "plain", "seconds", 6.0),
        Prediction("plain", "baseline", "seconds", 1.1),
    )
    committed = Registration("headlines", predictions, "2026-11-22T10:11:12+00:00", "abcd" * 16, 3)
    made = replace(record(), registration=committed)
    rows = prediction_rows(made)
    assert [(who, least, verdict) for who, least, _, verdict in rows] == [
        ("fast over baseline, by steps", "≥ 1.50×", "met"),
        ("fast over plain, by training time", "≥ 6.00×", "open"),
        ("plain over baseline, by training time", "≥ 1.10×", "not met"),
    ]
    assert rows[0][2].startswith("1.65× (")
    assert rows[0][2].endswith("p < 0.001 adjusted for 3 comparisons")
    assert "plain never reaches accuracy 0.9" in rows[2][2]
    page = render_report(title="t", studies=[made])
    assert "as the family <em>headlines</em> (SHA-256 <code>abcdabcdabcd</code>)" in page
    assert ">≥ 6.00×</td>" in page
    assert "Predicted before the runs, on" in page
    assert "The family has" not in page
    larger = replace(made, registration=replace(committed, num_tests=5))
    assert prediction_rows(larger)[0][2].endswith("adjusted for 5 comparisons")
    assert "The family has 5 tests. Those that aren't" in render_report(title="t", studies=[larger])
    older = replace(made, registration=replace(committed, num_tests=None))
    assert "The family has 4 tests at most" in render_report(title="t", studies=[older])
    assert "Predicted before the runs, on" not in render_report(title="t", studies=[record()])


@pytest.mark.parametrize("num_registered", [4, 5])
def test_a_family_of_five_is_a_screening_also_where_it_was_registered(num_registered: int) -> None:
    """Its level is 0.05, and all that's said of an arm says the same."""
    arms = {f"x{k}": log_quality(0.05 + 0.001 * k) for k in range(5)}
    made = study({"baseline": log_quality(), **arms, "later": log_quality(0.06)})
    registered = [*arms][:num_registered]
    predictions = tuple(Prediction(arm, "baseline", "seconds", 1.1) for arm in registered)
    made = replace(made, registration=Registration("f", predictions, "2026-01-01", "00", num_registered))
    claims = {one.arm: one for one in claims_of(made)}
    assert {one.verdict for one in claims.values()} == {"faster"}
    told = {
        arm for arm, one in claims.items() if "Found by screening, at 0.05: run it again by itself." in one.sentence
    }
    headlines = {*registered} if num_registered == 4 else set()
    assert told == {*arms, "later"} - headlines
    gained = opening_sentences([made], None)[1]
    assert "later needs" in gained
    assert gained.count("by a screening") == gained.count(" needs ") - sum(
        f"{arm} needs" in gained for arm in headlines
    )
    standings = {one.arm: one.standing for one in arm_findings(with_parts(made), "s", "seconds")}
    own = "registered screening, p < 0.05" if num_registered == 5 else "registered, p < 0.01"
    assert standings == dict.fromkeys((*arms, "later"), "screening, p < 0.05") | dict.fromkeys(registered, own)


def with_parts(made: StudyRecord) -> StudyRecord:
    return replace(made, arms=tuple(replace(arm, methods=(arm.name.upper(),)) for arm in made.arms))
