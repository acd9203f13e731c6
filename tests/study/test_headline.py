"""Headline claims: one family over several studies, each over the opponent that it names."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest

from cosmati.errors import RunError
from cosmati.explorer.evidence import committed_evidence, shown_claims
from cosmati.records.headline import HeadlineClaim, headline_from_json, headline_to_json
from cosmati.records.study import (
    NUM_HEADLINES,
    ArmRecord,
    Prediction,
    Registration,
    SearchRecord,
    StudyRecord,
    TrialRecord,
)
from cosmati.study import comparison
from cosmati.study.comparison import SpeedUp, speed_up_at_equal_quality
from cosmati.study.curves import Axis
from cosmati.study.headline import Contest, headline_claims
from cosmati.study.predictions import SMALLEST_P, outcomes_of
from cosmati.study.statistics import holm
from tests.study.oracles import log_quality, study
from tools.write_headline import PICTURED, PICTURES, ROOT, block, parts_of, picture, study_of, with_block

TRIALS = tuple(TrialRecord(i, {"lr": 0.1 * i}, False, 0.25, 100, 0.5, 10, 100, 1.0) for i in range(5))
KINDS = {"baseline": "tuned", "plain": "plain"}


def searched(record: StudyRecord, *, tuned: int = 5, arm: int = 5, known: bool = False) -> StudyRecord:
    """Mark the opponents, and give both searched arms their trials; what they chose is the first point."""
    sizes = {"baseline": tuned, "composition": arm}
    by_hand = {"baseline": 10, "composition": 50}

    def marked(one: ArmRecord) -> ArmRecord:
        trials = (replace(TRIALS[0], is_known=known), *TRIALS[1:])
        found = SearchRecord((), trials[: sizes[one.name]], 0, by_hand[one.name]) if one.name in sizes else None
        return replace(one, opponent=KINDS.get(one.name), search=found)

    return replace(record, arms=tuple(marked(one) for one in record.arms))


def wobbly(gain: float, size: float = 0.002) -> Callable[[float, int], float]:
    base = log_quality(gain)
    return lambda budget, seed: base(budget, seed) + size * math.sin(37 * budget * (seed + 1) + 100 * gain)


def trio(noise: float = 0.002) -> StudyRecord:
    """The composition is 1.5 times as fast as the baseline, and nearly 3 times as fast as the plain one."""
    arms = {"baseline": 0.0, "composition": 0.1 * math.log(1.5), "plain": -0.1 * math.log(2)}
    return searched(study({name: wobbly(gain, noise) for name, gain in arms.items()}))


def registered(record: StudyRecord, *opponents: str, num_tests: int | None = None) -> StudyRecord:
    predictions = tuple(Prediction("composition", one, "seconds", 1.2) for one in opponents)
    return replace(record, registration=Registration("headlines", predictions, "2026-11-22", "0" * 64, num_tests))


def contest(record: StudyRecord, opponent: str, task: str = "text") -> Contest:
    return Contest(
        task=task, study=record, arm="composition", opponent=opponent, date="2026-11-22T00:00:00Z", commit="ab" * 20
    )


def raw_p(one: Contest, axis: Axis = "seconds") -> float:
    found = speed_up_at_equal_quality(replace(one.study, baseline_arm=one.opponent), "composition", axis=axis)
    assert isinstance(found, SpeedUp)
    return 1.0 if found.p_value is None else max(SMALLEST_P, found.p_value)


def test_each_claim_is_over_the_opponent_it_names() -> None:
    record = registered(trio(), "baseline", "plain", num_tests=4)
    tuned, plain = headline_claims([contest(record, "baseline"), contest(record, "plain")])
    assert (tuned.opponent, plain.opponent) == ("tuned", "plain")
    assert tuned.speed_up == pytest.approx(1.5, rel=0.05)
    assert plain.speed_up is not None
    assert plain.speed_up > 2.0
    assert (tuned.baseline_trials, tuned.arm_trials, plain.baseline_trials) == (5, 5, 0)
    assert tuned.quality == pytest.approx(0.9, abs=0.01)
    assert plain.quality == pytest.approx(0.9 - 0.1 * math.log(2), abs=0.01)
    assert tuned.n == 5
    assert tuned.low is not None
    assert tuned.low < tuned.speed_up
    assert tuned.is_shown


def test_p_values_are_adjusted_for_the_family_that_was_registered() -> None:
    record = registered(trio(0.02), "baseline", num_tests=4)
    alone = contest(record, "baseline")
    (claim,) = headline_claims([alone])
    assert 1e-9 < raw_p(alone) < 0.1, "p-values differ from what can't be told from 0"
    assert claim.p == pytest.approx(4 * raw_p(alone))
    assert (claim.family, claim.num_tests, claim.level, claim.is_registered) == ("headlines", 4, 0.01, True)
    # The page of the study says the same: one test has one p-value.
    assert [one.p_value for one in outcomes_of(record)] == [claim.p]
    other = replace(registered(trio(0.02), "baseline", "plain", num_tests=4), name="other")
    contests = [alone, contest(other, "baseline", "images"), contest(other, "plain", "images")]
    raw = [raw_p(one) for one in contests]
    expected = holm([*raw, 1.0])[:3]
    assert [claim.p for claim in headline_claims(contests)] == [
        None if p == 1.0 else q for p, q in zip(raw, expected, strict=True)
    ]


def test_a_registration_that_does_not_say_how_many_counts_as_the_most() -> None:
    """An older release couldn't say; a family that is too large is no better than it is."""
    record = registered(trio(0.02), "baseline", num_tests=None)
    (claim,) = headline_claims([contest(record, "baseline")])
    assert claim.p == pytest.approx(4 * raw_p(contest(record, "baseline")))
    assert claim.num_tests == NUM_HEADLINES == comparison.NUM_HEADLINES


def test_what_was_not_registered_is_a_screening_and_says_so() -> None:
    record = registered(trio(0.02), "baseline", num_tests=4)
    contests = [contest(record, "baseline"), contest(record, "plain")]
    claims = headline_claims(contests, axes=("seconds", "step"))
    assert [(one.opponent, one.axis, one.is_registered) for one in claims] == [
        ("tuned", "seconds", True),
        ("plain", "seconds", False),
        ("tuned", "step", False),
        ("plain", "step", False),
    ]
    assert {one.family for one in claims[1:]} == {"not registered: a screening by seconds and step"}
    assert {(one.level, one.num_tests) for one in claims[1:]} == {(0.05, 3)}
    tests: list[tuple[Contest, Axis]] = [(contests[1], "seconds"), (contests[0], "step"), (contests[1], "step")]
    raw = [raw_p(*test) for test in tests]
    assert [one.p or 1.0 for one in claims[1:]] == pytest.approx(holm(raw))
    alone, *others = (one.sentence for one in shown_claims(claims))
    assert "screening" not in alone
    assert all("It wasn't registered before the runs: a screening, at 0.05." in text for text in others)
    text = block(claims[:2], {})
    assert "the 4 tests of the family “headlines”, registered before the runs, of which 3 haven't" in text
    assert "the 3 tests of the family “not registered: a screening by seconds and step”." in text


def test_a_p_value_is_never_zero() -> None:
    """Two arms whose steps don't differ by seed: there is no spread, and Student's sums end at about 1e-15."""
    arms = {"baseline": log_quality(), "composition": log_quality(0.3)}
    record = searched(study(arms))
    (claim,) = headline_claims([contest(record, "baseline")], axes=("step",))
    found = speed_up_at_equal_quality(record, "composition", axis="step")
    assert isinstance(found, SpeedUp)
    assert found.p_value == 0.0
    assert claim.p == SMALLEST_P
    assert "adjusted p < 0.001" in shown_claims([claim])[0].sentence


def test_a_tuned_opponent_was_searched_as_hard() -> None:
    for sizes in ({"tuned": 3}, {"arm": 3}):
        record = searched(trio(), **sizes)
        with pytest.raises(RunError, match=r"wasn't searched as hard as 'composition': \d trials .* search_arms"):
            headline_claims([contest(record, "baseline")])
        assert headline_claims([contest(record, "plain")])[0].opponent == "plain"
    bare = trio()
    bare = replace(
        bare, arms=tuple(replace(one, search=None) if one.name == "composition" else one for one in bare.arms)
    )
    with pytest.raises(RunError, match="against 0 trials"):
        headline_claims([contest(bare, "baseline")])


def test_settings_that_were_known_before_are_said_with_the_trials_by_hand() -> None:
    record = searched(trio(), known=True)
    contests = [contest(record, "baseline"), contest(record, "plain")]
    tuned, plain = headline_claims(contests)
    assert [(one.arm_by_hand, one.baseline_by_hand) for one in (tuned, plain)] == [(50, 10), (50, None)]
    both = "known before the search, found by hand (about 50 trials for composition, about 10 trials for its opponent)"
    assert both in shown_claims([tuned])[0].sentence
    assert "(about 50 trials for composition)" in shown_claims([plain])[0].sentence
    assert both in block((tuned,), {})
    never = replace(tuned, speed_up=None, low=None, high=None, p=None)
    assert both in shown_claims([never])[0].sentence
    # What the search itself found needs no such words, whatever was tried by hand before.
    tuned, plain = headline_claims([replace(one, study=trio()) for one in contests])
    assert tuned.arm_by_hand is tuned.baseline_by_hand is plain.arm_by_hand is None
    assert "known before" not in shown_claims([tuned])[0].sentence


def test_an_arm_that_never_gets_there_has_no_figure() -> None:
    record = searched(study({"baseline": wobbly(0.0), "composition": wobbly(-0.5)}))
    (claim,) = headline_claims([contest(record, "baseline")])
    assert (claim.speed_up, claim.low, claim.high, claim.p) == (None, None, None, None)
    assert claim.quality == pytest.approx(0.9, abs=0.01)
    assert not claim.is_shown
    (shown,) = shown_claims([claim])
    assert shown.figure == ""
    assert "never reaches" in shown.sentence


def test_one_family_of_at_most_four_and_nothing_over_an_unsearched_baseline() -> None:
    record = registered(trio(), "baseline", num_tests=5)
    with pytest.raises(RunError, match=r"5 headlines .* before the runs"):
        headline_claims([contest(record, "baseline")])
    record = registered(trio(), "baseline", num_tests=1)
    with pytest.raises(RunError, match="registered with 1 tests, and here are 2"):
        headline_claims([contest(record, "baseline")] * 2)
    other = registered(trio(), "baseline", num_tests=2)
    with pytest.raises(RunError, match="one family"):
        headline_claims([contest(record, "baseline"), contest(other, "baseline")])
    bare = replace(record, arms=tuple(replace(arm, opponent=None) for arm in record.arms))
    with pytest.raises(RunError, match="neither"):
        headline_claims([contest(bare, "baseline")])


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
    num_tests=4,
    is_registered=True,
    baseline_trials=27,
    arm_trials=27,
    baseline_by_hand=None,
    arm_by_hand=None,
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


def test_an_opponent_is_named_by_the_trials_that_it_had() -> None:
    weak, plain = shown_claims(
        [replace(CLAIM, baseline_trials=3, arm_trials=400), replace(CLAIM, opponent="plain", baseline_trials=0)]
    )
    assert weak.title == "Text, over a baseline that had 3 trials, the arm 400"
    assert shown_claims([CLAIM])[0].title == "Text, over a tuned baseline, searched with as many trials"
    assert plain.title == "Text, over a plain public recipe"
    unsearched = replace(CLAIM, baseline_trials=0, arm_trials=0)
    assert "tuned" not in shown_claims([unsearched])[0].title


def test_a_command_goes_with_its_commit() -> None:
    text = block((replace(CLAIM, commit="0123456789 with changes"),), {})
    assert "`python -m benchmarks.headline text` at commit 01234567 with changes, 2026-11-22, on two cores." in text


def test_the_block_says_opponent_interval_and_hardware() -> None:
    text = block((CLAIM, replace(CLAIM, axis="rows", speed_up=7.7)), {"text": ("Muon", "n-grams")})
    assert "7.7" not in text
    for part in (
        "tuned",
        "1.60×",
        "1.50 to open",
        "n\u00a0=\u00a08",
        "On two cores.",
        "01234567",
        CLAIM.command,
        "Text: Muon, n-grams",
    ):
        assert part in text
    assert "| **≥\u00a01.60×** | 1.50 to open, n\u00a0=\u00a08 | bits per byte 2.500 |" in text
    page = f"a\n{text}\nz"
    assert with_block(page, text, "page") == page
    for broken in ("a", page + text, page.replace("<!-- end", "<!-- no end")):
        with pytest.raises(ValueError, match="once each"):
            with_block(broken, text, "page")


def test_a_row_has_a_figure_only_where_a_difference_is_shown() -> None:
    assert "| no difference shown | 1.50 to open" in block((replace(CLAIM, p=0.5),), {})
    never = block((replace(CLAIM, speed_up=None, low=None, high=None, p=None),), {})
    assert "| it never gets there | | bits per byte 2.500 |" in never


def test_the_picture_is_of_the_study_without_its_noise_arm() -> None:
    drawn = picture(study_of("text"), "light")
    labels = ["".join(one.itertext()) for one in ET.fromstring(drawn).iter() if one.tag.endswith("text")]
    assert {"baseline", "composition", "plain"} <= set(labels)
    assert "aa" not in labels
    (claim,) = [one for one in committed_evidence().claims if (one.task, one.opponent) == ("text", "tuned")]  # type: ignore[union-attr]
    assert f"{claim.speed_up:.2f} times as fast" in labels
    for name, theme in PICTURES.items():
        assert (ROOT / name).read_text(encoding="utf-8") == picture(study_of(PICTURED), theme)


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
    assert headline_claims(contests) == found.claims
    assert found.families in block(found.claims, {"images": parts_of("images")})
    known = {(one.arm_by_hand, one.baseline_by_hand) for one in found.claims if one.task == "images"}
    assert known == {(50, 10), (50, None)}
