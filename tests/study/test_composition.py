"""Parts alone, in pairs and together: read off studies whose gains and interactions were put in."""

from __future__ import annotations

import math

import pytest

from cosmati.records.study import StudyRecord
from cosmati.study.comparison import NotReached, SpeedUp
from cosmati.study.composition import pair_arms, pairs, single_parts, together, what_to_add
from cosmati.study.statistics import Estimate
from tests.study.oracles import log_quality, study

PARTS = {
    "Muon": ("Muon(lr=0.03)",),
    "ema": ("EMA(half_life='100ba')",),
    "warm-up": ("SeqLengthWarmup(duration=0.4)",),
    "Muon and EMA": ("Muon(lr=0.03)", "EMA(half_life='100ba')"),
    "three": ("Muon(lr=0.06)", "EMA(half_life='100ba')", "zero-init"),
}
GAINS = {"Muon": 1.2, "ema": 1.1, "warm-up": 1.15, "Muon and EMA": 1.2 * 1.1 * 1.05, "three": 1.5}


def noisy(ratio: float) -> object:
    base, phase = log_quality(0.1 * math.log(ratio)), 50 * ratio
    return lambda budget, seed: base(budget, seed) + 0.0002 * math.sin(phase + 31 * budget * (seed + 1))


@pytest.fixture(scope="module")
def record() -> StudyRecord:
    arms = {"baseline": log_quality(), "aa": log_quality()} | {name: noisy(ratio) for name, ratio in GAINS.items()}
    return study(arms, methods=PARTS | {"aa": ("Muon(lr=0.03)",)})


def ratio_of(found: SpeedUp | Estimate | NotReached) -> float:
    assert not isinstance(found, NotReached)
    return found.ratio if isinstance(found, SpeedUp) else found.value


def test_a_part_alone_is_any_arm_with_one_part(record: StudyRecord) -> None:
    found = single_parts(record)
    assert {kind: part.arm for kind, part in found.items()} == {
        "Muon": "Muon",
        "EMA": "ema",
        "SeqLengthWarmup": "warm-up",
    }
    for part in found.values():
        assert ratio_of(part.gain) == pytest.approx(GAINS[part.arm], rel=0.03)


def test_pairs_have_what_was_put_in(record: StudyRecord) -> None:
    (pair,) = pairs(record)
    assert (pair.arm, pair.parts, pair.unknown, pair.with_other_settings) == ("Muon and EMA", ("Muon", "EMA"), (), ())
    assert ratio_of(pair.ratio) == pytest.approx(1.05, rel=0.03)


def test_unknown_parts_and_other_settings_are_named(record: StudyRecord) -> None:
    found = together(record, "three")
    assert found is not None
    assert (found.parts, found.unknown, found.with_other_settings) == (("Muon", "EMA"), ("zero-init",), ("Muon",))
    assert ratio_of(found.ratio) == pytest.approx(1.5 / 1.2 / 1.1, rel=0.03)


def test_an_arm_without_two_known_parts_has_no_product(record: StudyRecord) -> None:
    assert together(record, "Muon") is None
    alone = study({"baseline": log_quality(), "both": log_quality(0.1)}, methods={"both": ("A", "B")})
    assert together(alone, "both") is None
    assert pairs(alone) == ()


def test_what_to_add_counts_what_is_measured(record: StudyRecord) -> None:
    assert [(one.part.kind, one.num_measured) for one in what_to_add(record, "Muon and EMA")] == [
        ("SeqLengthWarmup", 0)
    ]
    first, second = what_to_add(record, "Muon")
    assert (first.part.kind, first.num_measured) == ("EMA", 1)
    assert first.expected == pytest.approx(1.1 * 1.05, rel=0.03)
    assert (second.part.kind, second.num_measured) == ("SeqLengthWarmup", 0)
    assert second.expected == pytest.approx(1.15, rel=0.03)


def test_gains_that_are_not_shown_are_not_proposed() -> None:
    wild = study(
        {
            "baseline": log_quality(),
            "luck": lambda budget, seed: log_quality(0.005)(budget, seed) + 0.05 * math.sin(40 * seed + 9 * budget),
            "worse": log_quality(-0.02),
        },
        methods={"luck": ("L",), "worse": ("W",)},
    )
    assert set(single_parts(wild)) == {"L", "W"}
    assert what_to_add(wild, "baseline") == ()


def test_pairs_to_try_are_all_of_them() -> None:
    assert pair_arms(["a", "b", "c"]) == (("a", "b"), ("a", "c"), ("b", "c"))
