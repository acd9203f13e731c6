"""Parts alone, in pairs and together: read off studies whose gains and interactions were put in."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cosmati.records.study import StudyRecord
from cosmati.study.comparison import NotReached, SpeedUp
from cosmati.study.composition import (
    Measure,
    Together,
    joint_effects,
    kind_of,
    pair_arms,
    pairs,
    single_parts,
    what_to_add,
)
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
    return study(arms, methods=PARTS)


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


def together(record: StudyRecord, arm: str) -> Together | None:
    return next((one for one in joint_effects(record) if one.arm == arm), None)


def test_pairs_have_what_was_put_in(record: StudyRecord) -> None:
    (pair,) = pairs(record)
    assert (pair.arm, pair.parts, pair.unknown, pair.with_other_settings) == ("Muon and EMA", ("Muon", "EMA"), (), ())
    assert ratio_of(pair.ratio) == pytest.approx(1.05, rel=0.03)


def test_unknown_parts_and_other_settings_are_named(record: StudyRecord) -> None:
    found = together(record, "three")
    assert found is not None
    assert (found.parts, found.unknown, found.with_other_settings) == (("Muon", "EMA"), ("zero-init",), ("Muon",))
    assert isinstance(found.ratio, NotReached), "what zero-init gives would be in any ratio"
    assert "zero-init" in found.ratio.reason
    assert (found.p_value, found.is_shown) == (None, False)
    assert {one.num_tests for one in joint_effects(record)} == {1}, "what can't be tested makes no family larger"


def test_one_unknown_part_is_enough() -> None:
    """Neither helps the other, and C gives 1.8: no ratio holds that."""
    gains = {"a": 1.1, "b": 1.1, "abc": 1.21 * 1.8, "ac": 1.1 * 1.8}
    methods = {"a": ("A",), "b": ("B",), "abc": ("A", "B", "C"), "ac": ("A", "C")}
    arms = {"baseline": log_quality()} | {name: noisy(gain) for name, gain in gains.items()}
    for found in joint_effects(study(arms, methods=methods)):
        assert found.unknown == ("C",)
        assert isinstance(found.ratio, NotReached)
    known = study(arms | {"c": noisy(1.8)}, methods=methods | {"c": ("C",)})
    assert [ratio_of(one.ratio) for one in joint_effects(known)] == pytest.approx([1.0, 1.0], rel=0.03)


def drawn(gain: float, key: int, noise: float = 0.004) -> object:
    generator = np.random.Generator(np.random.Philox(key=[key, 43]))
    cells = {(budget, seed): generator.normal(0.0, noise) for seed in range(5) for budget in (0.5, 1.0)}
    return lambda budget, seed: 0.9 + 0.1 * math.log(gain * budget) + cells[budget, seed]


def all_pairs(key: int, together: float = 1.0) -> StudyRecord:
    """Five parts at two budgets, 1.15 times as fast each, and all pairs; the first pair gives `together` times more."""
    names = "ABCDE"
    both = {first + second: (first, second) for first, second in pair_arms(names)}
    gains = dict.fromkeys(names, 1.15) | dict.fromkeys(both, 1.15**2)
    gains["AB"] *= together
    arms = {arm: drawn(gain, 100 * key + k) for k, (arm, gain) in enumerate(({"baseline": 1.0} | gains).items())}
    return study(arms, budgets=(0.5, 1.0), methods={name: (name,) for name in names} | both)


@pytest.mark.parametrize("key", [2, 8, 16, 25])
def test_verdicts_on_all_pairs_are_one_family(key: int) -> None:
    """Studies without any interaction, chosen for plain 95 % intervals that leave 1 out: such are 11 of 40."""
    found = joint_effects(all_pairs(key))
    ratios = [one.ratio for one in found if isinstance(one.ratio, Estimate)]
    p_values = [one.p_value for one in ratios if one.p_value is not None]
    assert len(p_values) == 10
    assert any(not (one.low or 0) <= 1 <= (one.high or 9) for one in ratios)
    assert [(one.num_tests, one.is_shown) for one in found] == [(10, False)] * 10
    smallest = min(range(10), key=lambda k: p_values[k])
    assert found[smallest].p_value == pytest.approx(10 * p_values[smallest]), "as Bonferroni has it"


def test_an_interaction_among_all_pairs_is_found() -> None:
    helped = {one.arm for one in joint_effects(all_pairs(3, together=1.4)) if one.is_shown}
    assert helped == {"AB"}


def test_an_arm_without_two_known_parts_has_no_product(record: StudyRecord) -> None:
    assert together(record, "Muon") is None
    alone = study({"baseline": log_quality(), "both": log_quality(0.1)}, methods={"both": ("A", "B")})
    assert together(alone, "both") is None
    assert pairs(alone) == ()


def test_what_to_add_counts_what_is_measured(record: StudyRecord) -> None:
    found = what_to_add(record, ["Muon and EMA", "Muon"])
    assert [(one.part.kind, one.num_measured) for one in found["Muon and EMA"]] == [("SeqLengthWarmup", 0)]
    first, second = found["Muon"]
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
    assert what_to_add(wild, ["baseline"]) == {"baseline": ()}


def test_a_gain_is_proposed_where_the_rule_says_shown() -> None:
    """Of many parts one has an interval above 1 and an adjusted p-value above the level."""
    names = [f"P{k}" for k in range(12)]
    arms = {"baseline": drawn(1.0, 0, 0.006)} | {name: drawn(1.0, 1 + k, 0.006) for k, name in enumerate(names)}
    arms["P5"], arms["P7"] = drawn(1.14, 60, 0.006), drawn(1.6, 61, 0.006)
    record = study(arms, budgets=(0.5, 1.0), methods={name: (name,) for name in names})
    gains = {kind: one.gain for kind, one in single_parts(record).items()}
    hints = {kind for kind, one in gains.items() if isinstance(one, SpeedUp) and one.low is not None and one.low > 1}
    assert hints > {"P7"}
    assert [one.part.kind for one in what_to_add(record, ["baseline"])["baseline"]] == ["P7"]


def test_pairs_to_try_are_all_of_them() -> None:
    assert pair_arms(["a", "b", "c"]) == (("a", "b"), ("a", "c"), ("b", "c"))


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_differences_are_held_against_their_sum(*, higher_is_better: bool) -> None:
    """By difference in quality at equal cost each pair that was run is measured, whether or not it gets anywhere."""
    sign = 1.0 if higher_is_better else -1.0
    put_in = {"baseline": 0.0, "a": 0.02, "b": -0.05, "both": 0.02 - 0.05 + 0.03, "plain sum": 0.02 - 0.05}

    def reached(arm: str, gain: float, budget: float, seed: int) -> float:
        noise = 0.0005 * math.sin(7 * len(arm) + 31 * budget * (seed + 1))
        return sign * (0.5 + gain + 0.1 * math.log(budget) + noise)

    quality = {arm: partial(reached, arm, gain) for arm, gain in put_in.items()}
    methods = {"a": ("A",), "b": ("B",), "both": ("A", "B"), "plain sum": ("A", "B")}
    found = joint_effects(
        study(quality, methods=methods, higher_is_better=higher_is_better), measure="difference", axis="step"
    )
    both, plain = found
    assert ratio_of(both.ratio) == pytest.approx(0.03, abs=0.002)
    assert ratio_of(plain.ratio) == pytest.approx(0.0, abs=0.002)
    assert both.is_shown
    assert not plain.is_shown
    assert both.num_tests == 2
    by_speed = joint_effects(study(quality, methods=methods, higher_is_better=higher_is_better), axis="step")
    assert isinstance(by_speed[0].ratio, NotReached), "b never comes to the baseline's best"


def test_differences_at_one_seed_or_without_runs_show_nothing() -> None:
    quality = {arm: log_quality(gain) for arm, gain in {"baseline": 0.0, "a": 0.1, "b": 0.1, "both": 0.9}.items()}
    methods = {"a": ("A",), "b": ("B",), "both": ("A", "B")}
    (one,) = joint_effects(study(quality, methods=methods, seeds=(0,)), measure="difference")
    assert not one.is_shown
    whole = study(quality, methods=methods)
    (none,) = joint_effects(replace(whole, runs=()), measure="difference")
    assert isinstance(none.ratio, NotReached)
    slow = study(quality, methods=methods, pace={"both": 100.0})
    (late,) = joint_effects(slow, measure="difference")
    assert isinstance(late.ratio, NotReached)
    assert "both has no run" in late.ratio.reason


@pytest.mark.parametrize("measure", ["speed-up", "difference"])
@pytest.mark.parametrize("loser", ["baseline", "Muon", "Muon and EMA"])
def test_an_interaction_of_the_seeds_that_went_well_is_not_shown(loser: str, measure: Measure) -> None:
    gains = {"baseline": 1.0} | GAINS | {"Muon and EMA": 1.7}

    def quality(name: str, num_lost: int, budget: float, seed: int) -> float:
        is_lost = name == loser and seed < num_lost and budget == 0.5
        return math.nan if is_lost else noisy(gains[name])(budget, seed)  # type: ignore[operator]

    def found(num_lost: int) -> Together:
        arms = {name: partial(quality, name, num_lost) for name in gains}
        made = study(arms, methods=PARTS, seeds=range(8))
        return next(one for one in joint_effects(made, axis="step", measure=measure) if one.arm == "Muon and EMA")

    assert found(0).is_shown
    assert found(3).is_shown  # 3 of 32 runs
    assert not found(4).is_shown
    assert found(4).p_value is None


EXACT = {"baseline": 1.0, "A": 2.0, "B": 1.3, "C": 1.5, "AC": 3.0, "BC": 1.95}


def exactly(gains: dict[str, float], methods: dict[str, tuple[str, ...]] | None = None) -> StudyRecord:
    """Arms of exact speed-ups, a bit of noise each; an arm's letters are its parts."""
    arms = {
        arm: lambda b, s, g=gain, k=k: 0.9 + 0.1 * math.log(g * b) + 0.0003 * math.sin(71 * (k + 1) * (s + 1) * b)
        for k, (arm, gain) in enumerate(gains.items())
    }
    parts = {arm: tuple(arm) for arm in gains if arm.isupper()}
    budgets = (0.125, 0.25, 0.5, 1.0)
    return study(arms, budgets=budgets, methods=parts | (methods or {}))  # type: ignore[arg-type]


def advised(record: StudyRecord, arm: str) -> dict[str, float]:
    return {one.part.name: one.expected for one in what_to_add(record, [arm])[arm]}


def test_a_part_that_slows_a_composition_down_is_not_advised() -> None:
    record = exactly(EXACT | {"AB": 2 * 1.3 * 0.45})  # A and B together are slower than A alone
    assert advised(record, "A") == pytest.approx({"C": 1.5}, rel=0.02)
    assert advised(record, "AC") == {}, "B would give 1.3 * 0.45 = 0.585"
    assert advised(record, "BC") == {}, "A would give 2 * 0.45 = 0.9"
    assert set(advised(record, "baseline")) == {"A", "B", "C"}


@pytest.mark.parametrize("together", [0.78, 0.6])
def test_a_pair_that_never_comes_to_the_baselines_best_speaks_against_its_parts(together: float) -> None:
    record = exactly(EXACT | {"AB": together})  # slower than the baseline, so it never gets there
    (pair,) = [one for one in pairs(record) if one.arm == "AB"]
    assert isinstance(pair.ratio, NotReached)
    assert advised(record, "AC") == {}
    assert advised(record, "BC") == {}
    assert set(advised(record, "A")) == {"C"}


def test_a_pair_that_is_too_good_to_be_read_off_is_counted_and_not_against_its_parts() -> None:
    record = exactly(EXACT | {"AB": 12.0})  # better at its smallest budget than the baseline ever is
    (found,) = what_to_add(record, ["AC"])["AC"]
    assert (found.part.name, found.num_measured, found.num_unread) == ("B", 1, 1)


def test_arms_of_one_part_are_told_apart_and_a_pair_stands_against_its_own_settings() -> None:
    gains = {"baseline": 1.0, "weak": 1.3, "strong": 2.0, "same": 1.2, "b": 1.5, "pair": 3.0, "other": 1.3 * 1.5}
    methods = {"weak": ("A(1)",), "strong": ("A(2)",), "same": ("A(1)",), "b": ("B",)}
    record = exactly(gains, methods | {"pair": ("A(2)", "B"), "other": ("A(3)", "B")})
    found = single_parts(record)
    assert {name: one.arm for name, one in found.items()} == {
        "A(1), arm weak": "weak",
        "A(2)": "strong",
        "A(1), arm same": "same",
        "B": "b",
    }
    pair, other = joint_effects(record)
    assert (pair.alone, pair.with_other_settings) == (("strong", "b"), ())
    assert ratio_of(pair.ratio) == pytest.approx(3.0 / (2.0 * 1.5), rel=0.02)
    assert (other.alone, other.with_other_settings) == (("weak", "b"), ("A",)), (
        "nobody ran A(3) alone: the first stands"
    )
    assert ratio_of(other.ratio) == pytest.approx(1.0, rel=0.02)


def test_a_part_of_several_methods_is_a_part_of_its_own() -> None:
    names = ["Muon(lr=0.02)", 'EMA(half_life="9ba", of=(1, 2))', "Muon(lr=0.02) + EMA(half_life=9)", "n (of 3) groups"]
    assert [kind_of(name) for name in names] == ["Muon", "EMA", *names[2:]]
