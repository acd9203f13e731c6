"""Headline claims: one family over several studies, each over the opponent that it names."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from cosmati.errors import RunError
from cosmati.explorer.evidence import committed_evidence, shown_claims
from cosmati.records.headline import HeadlineClaim, headline_from_json, headline_to_json
from cosmati.records.study import ArmRecord, SearchRecord, StudyRecord, TrialRecord
from cosmati.study.comparison import speed_up_at_equal_quality
from cosmati.study.headline import Contest, headline_claims
from cosmati.study.statistics import holm
from tests.study.oracles import log_quality, study
from tools.write_headline import block, with_block

TRIALS = tuple(TrialRecord(i, {"lr": 0.1 * i}, False, 0.25, 100, 0.5, 10, 100, 1.0) for i in range(5))
KINDS = {"baseline": "tuned", "plain": "plain"}


def searched(record: StudyRecord, *, tuned: int = 5, arm: int = 4) -> StudyRecord:
    """Mark the opponents, and give both searched arms their trials."""
    sizes = {"baseline": tuned, "composition": arm}

    def marked(one: ArmRecord) -> ArmRecord:
        found = SearchRecord((), TRIALS[: sizes[one.name]], 0) if one.name in sizes else None
        return replace(one, opponent=KINDS.get(one.name), search=found)

    return replace(record, arms=tuple(marked(one) for one in record.arms))


def wobbly(gain: float) -> object:
    base = log_quality(gain)
    return lambda budget, seed: base(budget, seed) + 0.002 * math.sin(37 * budget * (seed + 1) + 100 * gain)


def trio() -> StudyRecord:
    """The composition is 1.5 times as fast as the baseline, and nearly 3 times as fast as the plain one."""
    arms = {"baseline": 0.0, "composition": 0.1 * math.log(1.5), "plain": -0.1 * math.log(2)}
    return searched(study({name: wobbly(gain) for name, gain in arms.items()}))


def contest(record: StudyRecord, opponent: str, task: str = "text") -> Contest:
    return Contest(
        task=task, study=record, arm="composition", opponent=opponent, date="2026-11-22T00:00:00Z", commit="ab" * 20
    )


def test_each_claim_is_over_the_opponent_it_names() -> None:
    record = trio()
    tuned, plain = headline_claims([contest(record, "baseline"), contest(record, "plain")], family="headlines")
    assert (tuned.opponent, plain.opponent) == ("tuned", "plain")
    assert tuned.speed_up == pytest.approx(1.5, rel=0.05)
    assert plain.speed_up is not None
    assert plain.speed_up > 2.0
    assert (tuned.baseline_trials, tuned.arm_trials, plain.baseline_trials) == (5, 4, 0)
    assert tuned.quality == pytest.approx(0.9, abs=0.01)
    assert plain.quality == pytest.approx(0.9 - 0.1 * math.log(2), abs=0.01)
    assert tuned.n == 5
    assert tuned.low is not None
    assert tuned.low < tuned.speed_up
    assert tuned.is_shown


def test_p_values_are_adjusted_over_all_studies() -> None:
    first, second = trio(), replace(trio(), name="other")
    contests = [contest(first, "baseline"), contest(second, "baseline", "images"), contest(second, "plain", "images")]
    raw = []
    for one in contests:
        found = speed_up_at_equal_quality(replace(one.study, baseline_arm=one.opponent), "composition")
        raw.append(1.0 if found.p_value is None else found.p_value)  # type: ignore[union-attr]
    claims = headline_claims(contests, family="headlines")
    assert [claim.p for claim in claims] == [None if p == 1.0 else q for p, q in zip(raw, holm(raw), strict=True)]
    alone = headline_claims(contests[:1], family="headlines")[0]
    assert alone.p is not None
    assert claims[0].p == pytest.approx(min(3 * alone.p, claims[0].p or 0.0))
    awaited = headline_claims(contests[:1], family="headlines", num_registered=4)[0]
    assert awaited.p == pytest.approx(4 * alone.p)


def test_an_arm_that_never_gets_there_has_no_figure() -> None:
    record = searched(study({"baseline": wobbly(0.0), "composition": wobbly(-0.5)}))
    (claim,) = headline_claims([contest(record, "baseline")], family="headlines")
    assert (claim.speed_up, claim.low, claim.high, claim.p) == (None, None, None, None)
    assert claim.quality == pytest.approx(0.9, abs=0.01)
    assert not claim.is_shown
    (shown,) = shown_claims([claim])
    assert shown.figure == ""
    assert "never reaches" in shown.sentence


def test_no_more_than_four_and_none_over_an_unsearched_baseline() -> None:
    record = trio()
    with pytest.raises(RunError, match="before the runs"):
        headline_claims([contest(record, "baseline")] * 5, family="headlines")
    bare = replace(record, arms=tuple(replace(arm, opponent=None) for arm in record.arms))
    with pytest.raises(RunError, match="neither"):
        headline_claims([contest(bare, "baseline")], family="headlines")


CLAIM = HeadlineClaim(
    task="text",
    arm="composition",
    opponent="tuned",
    axis="seconds",
    metric="bits per byte",
    quality=2.5,
    n=8,
    speed_up=1.6,
    low=1.5,
    high=None,
    level=0.01,
    p=0.0002,
    family="headlines",
    baseline_trials=27,
    arm_trials=27,
    command="python -m benchmarks.headline text",
    hardware="two cores",
    date="2026-11-22T10:00:00Z",
    commit="0123456789",
)


def test_claims_go_through_json() -> None:
    text = headline_to_json((CLAIM, replace(CLAIM, p=None)))
    assert headline_from_json(text) == (CLAIM, replace(CLAIM, p=None))
    assert [entry["speed_up"] for entry in json.loads(text)] == [1.6, 1.6]
    for broken, why in (
        ("{}", "a list"),
        ("[{}]", "missing"),
        ("[", "JSON"),
        (text.replace('"n": 8', '"n": "8"'), "int"),
    ):
        with pytest.raises(RunError, match=why):
            headline_from_json(broken)


@pytest.mark.parametrize(
    ("change", "is_shown"),
    [
        ({}, True),
        ({"p": 0.02}, False),
        ({"p": 0.01}, False),
        ({"p": None}, False),
        ({"low": 0.9, "high": 2.5}, False),
        ({"low": None}, False),
        ({"low": 0.4, "high": 0.8, "speed_up": 0.6}, True),
    ],
)
def test_a_large_figure_stands_only_where_a_difference_is_shown(change: dict[str, float], is_shown: bool) -> None:
    (shown,) = shown_claims([replace(CLAIM, **change)])
    assert shown.is_shown is is_shown
    assert bool(shown.figure) is is_shown
    assert ("No difference is shown" in shown.sentence) is not is_shown
    assert "27 trials" in shown.sentence


def test_a_bound_is_marked() -> None:
    bound, closed = shown_claims([CLAIM, replace(CLAIM, high=1.7)])
    assert bound.figure == "≥ 1.60×"
    assert "in at most 62.5 % of its" in bound.sentence
    assert closed.figure == "1.60×"
    assert "in 62.5 % of its" in closed.sentence


def test_the_block_says_opponent_interval_and_hardware() -> None:
    text = block((CLAIM, replace(CLAIM, axis="rows", speed_up=7.7)), {"text": ("Muon", "n-grams")})
    assert "7.7" not in text
    for part in (
        "tuned",
        "1.60×",
        "1.50 to open",
        "n\u00a0=\u00a08",
        "two cores",
        "01234567",
        CLAIM.command,
        "Text: Muon, n-grams",
    ):
        assert part in text
    page = f"a\n{text}\nz"
    assert with_block(page, text, "page") == page
    for broken in ("a", page + text, page.replace("<!-- end", "<!-- no end")):
        with pytest.raises(ValueError, match="once each"):
            with_block(broken, text, "page")


def test_what_the_package_claims_is_what_was_committed() -> None:
    found = committed_evidence()
    assert found is not None
    claimed = {(claim.task, claim.arm, claim.opponent): claim for claim in found.claims}
    studies = dict(found.studies)
    contests = [
        Contest(
            task=task,
            study=studies[task],
            arm=arm,
            opponent=next(one.name for one in studies[task].arms if one.opponent == opponent),
            date=claim.date,
            commit=claim.commit,
        )
        for (task, arm, opponent), claim in claimed.items()
    ]
    assert headline_claims(contests, family=found.claims[0].family, num_registered=4) == found.claims
