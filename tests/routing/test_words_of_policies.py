"""Explanations, differences and drawings of policies say in words what the compiled table says in numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from cosmati.errors import PolicyError
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_analysis import (
    CellChange,
    Explanation,
    _kind,
    _kinds,
    _shade,
    _shared_regions,
    _Side,
    diff,
    explain,
    heat_map_text,
    table_text,
)
from cosmati.routing.regions import Regions
from tests.routing.samples import PARTITION, REGIONS, TAXONOMY, compiled, policy_of

MEASURES = {"trust": {"grades": ["low", "high"]}, "age": {"grades": ["old"]}}
BANDS: dict[str, Any] = {"measure": "quality", "names": ["low", "high"], "thresholds": [0.5]}
FLOOR = [{"class": "f", "band": "high"}]
WAITS: list[dict[str, object]] = [{"class": "f", "phase": "early", "decision": "defer"}]


def told(rules: list[dict[str, object]], *cell: str, **fields: object) -> Explanation:
    return explain(policy_of(rules, **fields), *cell, taxonomy=TAXONOMY)


def change(**given: Any) -> CellChange:
    usual = {
        "class_path": "f",
        "old_region": "head",
        "new_region": "head",
        "start_step": 2,
        "end_step": 5,
        "old_weight": 0.5,
        "new_weight": 0.5,
        "old_decision": "gate",
        "new_decision": "gate",
    }
    return CellChange(**(usual | given))


# ---------------------------------------------------------------------------------------------------------- one change


@pytest.mark.parametrize(
    ("weights", "decisions", "direction"),
    [
        ((0.5, 0.25), ("gate", "gate"), "tightens"),
        ((0.25, 0.5), ("gate", "gate"), "loosens"),
        ((0.0, 0.0), ("defer", "reject"), "tightens"),
        ((0.0, 0.0), ("reject", "defer"), "loosens"),
        ((0.0, 0.0), ("admit", "defer"), "tightens"),
        ((0.0, 0.0), ("gate", "defer"), "tightens"),
        ((0.0, 0.0), ("defer", "gate"), "loosens"),
        ((0.5, 0.25), ("reject", "admit"), "tightens"),
        ((0.5, 0.5), ("gate", "admit"), "loosens"),
    ],
)
def test_less_weight_is_tighter_and_at_equal_weights_the_decision_says(
    weights: tuple[float, float], decisions: tuple[str, str], direction: str
) -> None:
    one = change(old_weight=weights[0], new_weight=weights[1], old_decision=decisions[0], new_decision=decisions[1])
    assert one.direction == direction


def test_a_change_is_told_in_one_line() -> None:
    one = change(new_weight=0.25, band="high", band_number=1, grades=(("trust", "low"),))
    assert one.name == "f, high, trust low"
    assert str(one) == "tightens: f, high, trust low, head, steps 2 to 5: 0.5 (gate) -> 0.25 (gate)"
    assert change().cell == "f, head"
    assert change().result == "0.5 (gate) -> 0.5 (gate)"


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (("head", "head"), "head"),
        (("head", "tail"), "head -> tail"),
        ((None, "tail"), "None -> tail"),
        (("head", None), "head -> None"),
    ],
)
def test_a_region_that_changes_is_told_by_both_names(regions: tuple[str | None, str | None], words: str) -> None:
    assert change(old_region=regions[0], new_region=regions[1]).region == words


# ------------------------------------------------------------------------------------------------------- explanations


def test_a_kind_names_each_measure_and_what_was_not_measured_has_no_grade() -> None:
    policy = policy_of([], measures=MEASURES)
    assert _kind(policy, "", {"trust": "low"}).grades == (("age", ""), ("trust", "low"))
    assert _kind(policy, "x", {"trust": "", "age": "old"}) == ("x", (("age", "old"), ("trust", "")))


@pytest.mark.parametrize(
    ("grades", "said"),
    [
        ({"trusty": "low"}, "There's no measure 'trusty'; did you mean trust?"),
        ({"zz": ""}, "There's no measure 'zz'. There are: age, trust."),
        ({"trust": "lows"}, "There's no grade 'lows' of trust; did you mean low?"),
        ({"trust": "zz"}, "There's no grade 'zz' of trust. There are: low, high."),
        ({"age": "low"}, "There's no grade 'low' of age. There are: old."),
    ],
)
def test_grades_that_are_not_there_are_refused(grades: Mapping[str, str], said: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(said)):
        _kind(policy_of([], measures=MEASURES), "", grades)


def test_each_axis_is_looked_up_and_the_first_unknown_one_is_told() -> None:
    for cell, said in (
        (("a/b", "head", "early"), "There's no class 'a/b'; did you mean "),
        (("f", "hea", "later"), "There's no region 'hea'; did you mean head?"),
        (("f", "head", "zz"), "There's no phase 'zz'. There are: early, late."),
        (("f", "head", "late", "low"), "There's no band 'low'"),
        (("f", "head&tail", "late"), "There's no region 'head&tail'. It's the minimum of its members: ask for each"),
    ):
        with pytest.raises(PolicyError, match=f"^{re.escape(said)}"):
            told([], *cell)
    with pytest.raises(PolicyError, match=r"^There's no region 'head'\. There are: all\.$"):
        told([], "f", "head", "early", regions={})


def test_a_conflict_names_the_cell_with_its_band() -> None:
    rules: list[dict[str, object]] = [{"class": "f", "weight": 1}, {"class": "f", "weight": 0.5}]
    said = r"rule 1 .* and rule 2 .* disagree on \(f, head, late, high\)\. Add a rule for this cell\.$"
    with pytest.raises(PolicyError, match=said):
        told(rules, "f", "head", "late", "high", bands=BANDS)


def test_what_is_considered_comes_from_the_most_specific_rule_down() -> None:
    rules: list[dict[str, object]] = [
        {"class": "**", "weight": 1},
        {"class": "a/**", "weight": 0.75},
        {"class": "a/b/**", "weight": 0.5},
        {"class": "a/b/c", "weight": 0.25},
        {"class": "a/b/c", "region": "tail", "weight": 0.125},
    ]
    found = told(rules, "a/b/c", "head", "late")
    assert [one.split(" (")[0] for one in found.considered] == ["rule 4", "rule 3", "rule 2", "rule 1"]
    assert found.winner == "rule 4 (class a/b/c: weight 0.25)"
    assert (found.class_path, found.region, found.phase, found.lowered) == ("a/b/c", "head", "late", ())
    assert found.why == "on class, region and phase it's at least as specific as each of the others"


def test_a_band_below_a_floor_is_explained_without_a_rule() -> None:
    found = told([{"class": "f", "weight": 1}], "f", "head", "late", "low", bands=BANDS, floors=FLOOR)
    assert found == Explanation("f", "head", "late", (), None, "reject", 0.0, "the band is below a floor of the class")
    assert len({found, found}) == 1
    assert told([{"class": "f", "weight": 1}], "f", "head", "late", "high", bands=BANDS, floors=FLOOR).weight == 1


def test_all_that_is_not_beaten_and_says_the_same_is_told() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 1},
        {"class": "**", "weight": 0.5},
        {"class": "**", "region": "head", "weight": 1},
        {"class": "**", "phase": "late", "weight": 1},
    ]
    found = told(rules, "f", "head", "late")
    assert found.why == "no rule beats it, and what else isn't beaten (rule 3, 4) says the same"
    assert found.winner == "rule 1 (class f: weight 1)"


def test_a_deferral_says_in_which_phase_its_rows_come_again() -> None:
    phases = [{"name": "one", "until": "2ba"}, {"name": "two", "until": "4ba"}, {"name": "three"}]
    rules: list[dict[str, object]] = [{"class": "f", "phase": ["one", "two"], "decision": "defer"}]
    later: list[dict[str, object]] = [{"class": "f", "phase": "three", "weight": 1}]
    only = "it's the only rule that covers the cell"
    for phase in ("one", "two"):
        found = told(rules + later, "f", "head", phase, phases=phases)
        assert (found.result, found.weight, found.why) == ("defer", 0.0, f"{only}; its rows come again in phase three")
    assert told(rules, "f", "head", "two", phases=phases).why == f"{only}; no later phase offers its rows"
    earlier: list[dict[str, object]] = [{"class": "f", "phase": "one", "weight": 1}, {**rules[0], "phase": "two"}]
    assert told(earlier, "f", "head", "two", phases=phases).why == f"{only}; no later phase offers its rows"
    again: list[dict[str, object]] = [
        {"class": "f", "phase": "one", "decision": "defer"},
        {"class": "f", "phase": "two", "decision": "reject"},
        *later,
    ]
    assert told(again, "f", "head", "one", phases=phases).why.endswith("come again in phase three")


def test_a_weight_is_times_the_least_factor_and_what_is_rejected_only_lists_it() -> None:
    less = [
        {"class": "f", "measure": "trust", "grade": "low", "factor": 0.5},
        {"class": "f", "measure": "trust", "grade": ["low", "high"], "factor": 0.25},
    ]
    fields: dict[str, Any] = {"measures": {"trust": MEASURES["trust"]}, "attenuate": less}
    policy = policy_of([{"class": "f", "phase": "late", "weight": 0.5}], **fields)
    found = explain(policy, "f", "head", "late", taxonomy=TAXONOMY, grades={"trust": "low"})
    words = "it's the only rule that covers the cell; times 0.25, for trust low: the least factor of 2"
    assert (found.weight, found.why, len(found.lowered)) == (0.125, words, 2)
    rejected = explain(policy, "f", "head", "early", taxonomy=TAXONOMY, grades={"trust": "high"})
    assert (rejected.result, rejected.weight, len(rejected.lowered)) == ("reject", 0.0, 1)
    assert rejected.why == "no rule covers the cell, and the default is reject"
    other = explain(policy, "a/e", "head", "late", taxonomy=TAXONOMY)
    assert other.lowered == ()


def test_a_closed_block_teaches_nothing_and_is_told_for_all_rows() -> None:
    depth = {"container": "blocks", "ranges": ["0-1", "2-"], "open": [{"class": "f", "blocks": "2-", "phase": "late"}]}
    policy = policy_of([{"class": "f", "weight": 0.5}], regions={}, depth=depth)
    (closed, opened) = (name for name in sorted(policy.selectors) if name.startswith("blocks"))
    found = explain(policy, "f", closed, "late", taxonomy=TAXONOMY)
    assert (found.result, found.weight) == ("weight", 0.0)
    assert found.why.endswith("times 0, for all rows: the least factor of 1")
    assert [one.split(" (")[0] for one in found.lowered] == ["opening 1"]
    assert explain(policy, "f", opened, "late", taxonomy=TAXONOMY).lowered == ()


def test_rows_of_several_classes_are_explained_by_the_least_of_them() -> None:
    rules: list[dict[str, object]] = [
        *WAITS,
        {"class": "f", "phase": "late", "weight": 0.75},
        {"class": "a/e", "weight": 0.5},
    ]
    found = told(rules, "a/e&f", "head", "late")
    assert (found.class_path, found.result, found.weight) == ("a/e&f", "weight", 0.5)
    assert found.winner == "rule 3 (class a/e: weight 0.5)"
    prefix = "rows of several classes teach by the least of their weights, and that's a/e's: it's the only rule"
    assert found.why.startswith(prefix)
    assert told(rules, "a/e&f", "head", "early").result == "defer"
    assert told(rules, "a/b/c&f", "head", "early").result == "reject"


# --------------------------------------------------------------------------------------------------------- differences


def split(*names: str | None) -> Regions:
    """Return a partition of parameters `t` and `h`; None leaves one out."""
    held = dict.fromkeys(name for name in names if name)
    own = tuple(tuple(p for p, name in zip(("t", "h"), names, strict=True) if name == one) for one in held)
    return Regions(tuple(held), own, tuple((one,) for one in held), (), REGIONS)


def test_regions_are_compared_by_the_parameters_that_they_share() -> None:
    old, new = compiled([], split("tail", "head")), compiled([], split("tail", "tail"))
    assert _shared_regions(old, new) == [("tail", "tail"), ("head", "tail")]
    assert _shared_regions(new, old) == [("tail", "tail"), ("tail", "head")]
    assert _shared_regions(old, compiled([], split("tail", None))) == [("tail", "tail"), ("head", None)]
    assert _shared_regions(compiled([], split(None, "head")), old) == [("head", "head"), (None, "tail")]


def test_kinds_are_those_of_both_and_one_more_where_one_side_has_none() -> None:
    plain, banded = compiled([]), compiled([], bands=BANDS)
    assert list(_kinds(plain, plain)) == [(0, ())]
    assert list(_kinds(banded, banded)) == [(0, ()), (1, ())]
    assert list(_kinds(plain, banded)) == list(_kinds(banded, plain)) == [(0, ()), (1, ()), (2, ())]
    trust = compiled([], measures={"trust": MEASURES["trust"]})
    both = compiled([], measures=MEASURES)
    assert [dict(grades)["trust"] for _, grades in _kinds(trust, trust)] == ["", "low", "high"]
    assert [dict(grades)["trust"] for _, grades in _kinds(trust, plain)] == ["", "low", "high", "any other"]
    found = [tuple(dict(grades).values()) for _, grades in _kinds(trust, both)]
    assert found == [(age, trust) for age in ("", "old", "any other") for trust in ("", "low", "high")]


def test_a_side_says_what_holds_and_rejects_what_it_lacks() -> None:
    table = compiled([{"class": "f", "weight": 0.5}, {"class": "f", "phase": "late", "region": "head", "weight": 1}])
    side = _Side(table, "f", 0, (), "head")
    assert [side.at(step) for step in (0, 4, 5, 9)] == [(0.5, "gate")] * 2 + [(1.0, "gate")] * 2
    assert (side.has_bands, side.band_name) == (False, "")
    for lacks in (side._replace(class_path="g"), side._replace(region=None)):
        assert lacks.at(0) == (0.0, "reject")
    banded = _Side(compiled([{"class": "f", "weight": 1}], bands=BANDS), "f", 1, (), "head")
    assert (banded.has_bands, banded.band_name, banded.at(0)) == (True, "high", (1.0, "admit"))
    above = banded._replace(band=2)
    assert (above.band_name, above.at(0)) == ("", (0.0, "reject"))


def differing(old: CompiledPolicy, new: CompiledPolicy) -> list[tuple[Any, ...]]:
    return [(c.class_path, c.old_region, c.start_step, c.end_step, c.band, c.band_number) for c in diff(old, new)]


def test_a_difference_joins_the_steps_that_change_alike_and_tells_bands_where_there_are_some() -> None:
    rules: list[dict[str, object]] = [{"class": "f", "weight": 1}]
    old = compiled(rules, phases=[{"name": "one", "until": "3ba"}, {"name": "two", "until": "4ba"}, {"name": "three"}])
    assert differing(old, compiled([])) == [("f", name, 0, 10, "", None) for name in ("tail", "head")]
    late = compiled([{"class": "f", "phase": "late", "weight": 1}])
    assert differing(old, late) == [("f", name, 0, 5, "", None) for name in ("tail", "head")]
    banded = compiled([{**rules[0], "band": "low"}], bands=BANDS)
    full = compiled(rules, bands=BANDS)
    assert differing(full, banded) == [("f", name, 0, 10, "high", 1) for name in ("tail", "head")]
    above = [("f", name, 0, 10, band, n) for n, band in ((1, "high"), (2, "above")) for name in ("tail", "head")]
    assert differing(compiled(rules), banded) == differing(banded, compiled(rules)) == above


def test_gates_that_become_admissions_at_equal_weights_are_no_difference_and_deferrals_are() -> None:
    old = compiled([{"class": "f", "weight": 1}, {"class": "f", "region": "head", "weight": 0.5}])
    new = compiled([{"class": "f", "weight": 1}])
    assert [c.new_region for c in diff(old, new)] == ["head"]
    late: list[dict[str, object]] = [{"class": "f", "phase": "late", "weight": 1}]
    (one, other) = diff(compiled(late), compiled(WAITS + late))
    assert (one.direction, one.start_step, one.end_step, one.new_decision) == ("loosens", 0, 5, "defer")
    assert (one.region, other.region) == PARTITION.names


def test_a_difference_names_the_region_before_and_the_one_after() -> None:
    old = compiled(
        [{"class": "f", "weight": 1}, {"class": "f", "region": "head", "weight": 0.5}], split("tail", "head")
    )
    new = compiled(
        [{"class": "f", "weight": 1}, {"class": "f", "region": "tail", "weight": 0.25}], split("tail", "tail")
    )
    found = [(c.old_region, c.new_region, c.old_weight, c.new_weight) for c in diff(old, new)]
    assert found == [("tail", "tail", 1.0, 0.25), ("head", "tail", 0.5, 0.25)]
    back = [(c.old_region, c.new_region, c.old_weight, c.new_weight) for c in diff(new, old)]
    assert back == [("tail", "tail", 0.25, 1.0), ("tail", "head", 0.25, 0.5)]


# ------------------------------------------------------------------------------------------------------------ drawings


@pytest.mark.parametrize(
    ("weight", "shade"), [(0.1, "░"), (0.34, "▒"), (0.5, "▒"), (0.67, "▓"), (0.99, "▓"), (1, "█"), (1.01, "▲")]
)
def test_a_shade_is_darker_by_thirds(weight: float, shade: str) -> None:
    assert _shade(weight) == shade


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_words() -> None:
    assert table_text([["a", "bbb", "c"], ["dddd", "", "e"], ["f", "gg", ""]]) == "a     bbb  c\ndddd       e\nf     gg"


def test_a_class_is_drawn_once_where_its_kinds_are_alike_and_by_kind_elsewhere() -> None:
    table = compiled([{"class": "f", "weight": 1}, {"class": "f", "band": "low", "weight": 0.5}], bands=BANDS)
    assert heat_map_text(table, "early").splitlines() == [
        "phase early, steps 0 to 5",
        "class    decision  tail   head",
        "a/b/c    reject    ·      ·",
        "a/b/d    reject    ·      ·",
        "a/e      reject    ·      ·",
        "f, low   gate      ▒ 0.5  ▒ 0.5",
        "f, high  admit     █ 1    █ 1",
    ]
    with pytest.raises(PolicyError, match=r"^There's no phase 'zz'\. There are: early, late\.$"):
        heat_map_text(table, "zz")


def test_a_class_that_waits_comes_again_where_any_region_takes_it_and_grades_leave_something() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "phase": "early", "decision": "defer"},
        {"class": "f", "phase": "late", "region": "tail", "weight": 1},
    ]
    for region in ("head", "tail"):
        found = explain(policy_of(rules), "f", region, "early", taxonomy=TAXONOMY)
        assert (found.result, found.why.rpartition("; ")[2]) == ("defer", "its rows come again in phase late")
    measures = {"trust": {"grades": ["low", "high"]}}
    attenuate = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0}]
    graded = policy_of(rules, measures=measures, attenuate=attenuate)
    table = compiled(rules, measures=measures, attenuate=attenuate)
    for grade, result, why in (
        ("low", "reject", "once they're lowered"),
        ("high", "defer", "come again in phase late"),
    ):
        told = explain(graded, "f", "head", "early", taxonomy=TAXONOMY, grades={"trust": grade})
        assert told.result == table.decision[table.row(3, table.find_kind(0, {"trust": grade}))][0] == result
        assert why in told.why
