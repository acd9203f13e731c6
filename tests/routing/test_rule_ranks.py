"""A rule wins a cell by what it names on each axis, and names that aren't there are told with their place."""

from __future__ import annotations

from itertools import product

import pytest

from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, Rule, load_policy
from cosmati.routing.regions import Regions
from cosmati.routing.rules import (
    Match,
    cell_matches,
    check_names,
    class_matches,
    covers,
    disagreement,
    front,
    lowest_band,
    matching_rules,
    rule_text,
)
from tests.routing.samples import CLASSES, PARTITION, TAXONOMY, policy_of
from tests.routing.test_bands import BANDS
from tests.routing.test_measures import MEASURES


def rule(**fields: object) -> Rule:
    weight = {} if "decision" in fields else {"weight": 1.0}
    return Rule.model_validate({"class": "**"} | weight | fields)


def match(number: int, *ranks: int, **fields: object) -> Match:
    first, second, third, fourth = ranks
    return Match(number, rule(**fields), (first, second, third, fourth))


# How specific a rule is.


@pytest.mark.parametrize(
    ("pattern", "path", "rank"),
    [
        ("**", "f", 0),
        ("**", "a/b/c", 0),
        ("f", "f", 1),
        ("a/e", "a/e", 2),
        ("a/b/c", "a/b/c", 3),
        ("a/**", "a/e", 1),
        ("a/**", "a/b/c", 1),
        ("a/b/**", "a/b/c", 2),
        ("a/**", "ab", None),
        ("a/b/**", "a/e", None),
        ("a/b/**", "a/b", None),
        ("a/b", "a/b/c", None),
        ("a", "a/e", None),
        ("f", "a/e", None),
    ],
)
def test_a_class_pattern_ranks_by_the_segments_that_it_fixes(pattern: str, path: str, rank: int | None) -> None:
    one = rule(**{"class": pattern})
    assert class_matches([one], path) == ([] if rank is None else [(1, one, rank)])


def test_rules_keep_their_places_and_rank_by_their_closest_pattern() -> None:
    rules = [rule(**{"class": "f"}), rule(**{"class": ["**", "a/**", "a/b/c"]}), rule(**{"class": ["a/**", "**"]})]
    assert class_matches(rules, "a/b/c") == [(2, rules[1], 3), (3, rules[2], 1)]
    assert class_matches(rules, "a/e") == [(2, rules[1], 1), (3, rules[2], 1)]
    assert class_matches([], "a/e") == []


AXES = ("region", "phase", "band")


def test_each_axis_ranks_by_whether_it_names_the_cell() -> None:
    cell = {"region": "head", "phase": "late", "band": "low"}
    spelt: list[list[tuple[list[str], int]]] = [
        [([cell[axis]], 1), (["*"], 0), (["*", cell[axis]], 1), (["*", "other"], 0), (["other"], -1)] for axis in AXES
    ]
    for (region, first), (phase, second), (band, third) in product(*spelt):
        one = rule(region=region, phase=phase, band=band)
        found = cell_matches([(4, one, 2)], **cell)
        ranks = (2, first, second, third)
        assert found == ([] if -1 in ranks else [Match(4, one, ranks)])


def test_matching_rules_are_those_of_the_class_that_cover_the_cell_too() -> None:
    rules = [rule(**{"class": "f"}), rule(region="head"), rule(**{"class": "a/**"}, phase="late"), rule(band="low")]
    found = matching_rules(rules, "a/e", "head", "late")
    assert [(one.number, one.specificity) for one in found] == [(2, (0, 1, 0, 0)), (3, (1, 0, 1, 0))]
    assert [one.number for one in matching_rules(rules, "a/e", "tail", "early", "low")] == [4]
    assert [one.number for one in matching_rules(rules, "f", "tail", "early")] == [1]


def test_a_match_beats_another_that_is_nowhere_more_specific() -> None:
    ranks = list(product((0, 1), repeat=4))
    for mine, theirs in product(ranks, ranks):
        first, second = match(1, *mine), match(2, *theirs)
        beaten = all(m >= t for m, t in zip(mine, theirs, strict=True)) and sum(mine) > sum(theirs)
        assert first.beats(second) == beaten
        assert front([first, second]) == [
            one for one, other in ((first, second), (second, first)) if not other.beats(one)
        ]
    assert front([]) == []


def test_a_front_has_each_match_that_none_beats_in_order() -> None:
    low, one, other = match(1, 0, 0, 0, 0), match(2, 0, 1, 0, 0), match(3, 1, 0, 0, 0)
    assert front([low, one, other]) == [one, other]
    assert front([other, low, one]) == [other, one]
    top = match(4, 1, 1, 0, 0)
    assert front([low, top, one, other]) == [top]


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"weight": 0.5}, ("weight", 0.5)),
        ({"weight": 0.0}, ("weight", 0.0)),
        ({"weight": -0.0}, ("weight", 0.0)),
        ({"decision": "reject"}, ("reject", 0.0)),
        ({"decision": "defer"}, ("defer", 0.0)),
    ],
)
def test_a_match_says_a_weight_or_a_decision(fields: dict[str, object], outcome: tuple[str, float]) -> None:
    found = match(1, 0, 0, 0, 0, **fields).outcome
    assert found == outcome
    assert str(found[1]) == str(outcome[1])  # -0.0 is 0.0


def test_the_first_of_a_front_disagrees_with_the_first_that_says_otherwise() -> None:
    half, same, one, gone = (
        match(number, 0, 0, 0, 0, **fields)
        for number, fields in enumerate([{"weight": 0.5}, {"weight": 0.5}, {"weight": 1.0}, {"decision": "defer"}], 1)
    )
    assert disagreement([]) is None
    assert disagreement([half]) is None
    assert disagreement([half, same]) is None
    assert disagreement([half, same, one, gone]) == (half, one)
    assert disagreement([gone, half]) == (gone, half)


def test_a_rule_in_words_leaves_open_axes_out() -> None:
    full = rule(**{"class": ["f", "a/e"]}, region=["tail", "head"], phase="late", band="low", weight=0.25)
    assert rule_text(full) == "class a/e | f, region head | tail, phase late, band low: weight 0.25"
    assert rule_text(rule()) == "class **: weight 1"
    assert rule_text(rule(phase=["*", "late"], decision="defer")) == "class **, phase * | late: defer"
    assert str(match(3, 0, 0, 0, 0)) == "rule 3 (class **: weight 1)"


# Floors.


def test_the_lowest_band_of_a_class_is_the_highest_of_its_floors() -> None:
    floors = [{"class": "a/**", "band": "middle"}, {"class": "a/b/c", "band": "high"}, {"class": "**", "band": "low"}]
    for ordered in (floors, floors[::-1]):
        policy = policy_of([], bands=BANDS, floors=ordered)
        assert [lowest_band(policy, path) for path in CLASSES] == [2, 1, 1, 0]
    assert lowest_band(policy_of([], bands=BANDS), "f") == 0


def test_a_floor_covers_a_class_by_any_of_its_patterns() -> None:
    (floor,) = policy_of([], bands=BANDS, floors=[{"class": ["a/b/**", "f"], "band": "low"}]).floors
    assert [covers(floor, path) for path in CLASSES] == [True, True, False, True]
    (all_of_them,) = policy_of([], bands=BANDS, floors=[{"class": "**", "band": "low"}]).floors
    assert all(covers(all_of_them, path) for path in CLASSES)


# Names that aren't there.


def problems(
    policy: PolicyFile, regions: Regions = PARTITION, taxonomy: Taxonomy = TAXONOMY, joint: tuple[str, ...] = ()
) -> list[str]:
    return check_names(policy, taxonomy, regions, joint)


def test_a_policy_whose_names_are_there_has_no_problem() -> None:
    rules: list[dict[str, object]] = [
        {"class": ["**", "a/**", "a/b/**", "f"], "weight": 1},
        {"class": "a/e", "region": ["head", "*"], "phase": ["late", "*"], "band": ["high", "*"], "weight": 1},
    ]
    whole = policy_of(
        rules,
        bands=BANDS,
        floors=[{"class": "a/**", "band": "middle"}],
        measures=MEASURES,
        attenuate=[
            {"class": "f", "measure": "trust", "grade": "low", "factor": 0.5},
            {"class": "f", "measure": "trust", "grade": "low", "factor": 0.5, "region": "head", "phase": "late"},
        ],
    )
    assert problems(whole) == []
    assert problems(whole, joint=("a/e&f", "f")) == []
    assert problems(policy_of(rules[:1])) == []


def test_members_of_joint_classes_are_names_too() -> None:
    assert problems(policy_of([]), joint=("a/e&z", "f")) == [
        "rows are of class 'a/e&z', and there's no class 'z' in taxonomy t. There are: a/b/c, a/b/d, a/e, f."
    ]


def test_a_policy_for_another_taxonomy_is_told() -> None:
    assert problems(policy_of([], taxonomy="s")) == ["the policy is for taxonomy 's', and this is 't'"]
    cyrillic = "т"
    assert problems(policy_of([], taxonomy=cyrillic)) == [
        f"the policy is for taxonomy '{cyrillic}' (it has U+0442 CYRILLIC SMALL LETTER TE), and this is 't'"
    ]


def test_regions_that_were_cut_for_another_policy_are_told() -> None:
    mend = "divide them by its selectors"
    other = Regions(("head",), (("h",),), (("head",),), (), ("head",))
    assert problems(policy_of([]), other) == [
        f"the parameters were divided into head, but the policy declares head, tail: {mend}"
    ]
    assert problems(policy_of([], regions={})) == [
        f"the parameters were divided into head, tail, but the policy declares all: {mend}"
    ]
    whole = Regions(("all",), (("h", "t"),), (("all",),))
    assert problems(policy_of([], regions={}), whole) == []


def test_merged_regions_want_to_be_allowed() -> None:
    merged = Regions(("head&tail", "head"), (("w",), ("h",)), (("head", "tail"), ("head",)), (), ("head", "tail"))
    told = ["region head&tail merges tied parameters, and allow.tied is false"]
    assert problems(policy_of([]), merged) == told
    assert problems(policy_of([], allow={"tied": True}), merged) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"class": "a"}, "'a' is a branch; write 'a/**' for all classes below it"),
        ({"class": "f/**"}, "'f' is a class, with none below it; leave out '/**'"),
        ({"class": "a/f"}, "no class 'a/f' in taxonomy t; did you mean a/e?"),
        ({"class": "z/**"}, "no class 'z/**' in taxonomy t. There are: a/b/c, a/b/d, a/e, f."),
        ({"region": "hea"}, "no region 'hea'; did you mean head?"),
        ({"phase": "lat"}, "no phase 'lat'; did you mean late?"),
        ({"band": "lo"}, "no band 'lo'. There are: none."),
        ({"region": ["x", "head"]}, "no region 'x'. There are: head, tail."),
        ({"phase": "é"}, "no phase 'é' (it has U+00E9 LATIN SMALL LETTER E WITH ACUTE). There are: early, late."),
    ],
)
def test_names_of_a_rule_that_are_not_there_are_told_with_its_number(fields: dict[str, object], told: str) -> None:
    policy = policy_of([{"class": "f", "weight": 1}, {"class": "f", "weight": 1} | fields])
    assert problems(policy) == [f"rule 2: {told}"]


def test_bands_of_rules_and_floors_are_the_policys() -> None:
    policy = policy_of(
        [{"class": "f", "weight": 1, "band": ["lowe", "high"]}],
        bands=BANDS,
        floors=[{"class": "f", "band": "low"}, {"class": "a", "band": "hig"}],
    )
    assert problems(policy) == [
        "rule 1: no band 'lowe'; did you mean low?",
        "floor 2: 'a' is a branch; write 'a/**' for all classes below it",
        "floor 2: no band 'hig'; did you mean high?",
    ]
    assert problems(policy_of([], floors=[{"class": "f", "band": "low"}])) == [
        "floor 1: no band 'low'. There are: none."
    ]


def test_names_of_attenuations_that_are_not_there_are_told_with_their_number() -> None:
    fine = {"class": "f", "measure": "trust", "grade": "low", "factor": 0.5}
    bad: list[dict[str, object]] = [
        {"class": "a"},
        {"measure": "trus"},
        {"grade": ["lo", "high"]},
        {"region": ["tai", "*"]},
        {"phase": "earl"},
    ]
    policy = policy_of([], measures=MEASURES, attenuate=[fine, *(fine | one for one in bad)])
    assert problems(policy) == [
        "attenuation 2: 'a' is a branch; write 'a/**' for all classes below it",
        "attenuation 3: no measure 'trus'; did you mean trust?",
        "attenuation 4: no grade 'lo'; did you mean low?",
        "attenuation 5: no region 'tai'; did you mean tail?",
        "attenuation 6: no phase 'earl'; did you mean early?",
    ]
    assert problems(policy_of([], measures=MEASURES, attenuate=[fine | {"region": "x"}])) == [
        "attenuation 1: no region 'x'. There are: head, tail."
    ]
    assert problems(policy_of([], measures=MEASURES, attenuate=[fine | {"measure": "x"}])) == [
        "attenuation 1: no measure 'x'. There are: evidence, trust."
    ]


DEPTH = {"container": "blocks", "ranges": ["0-3", "4-"]}


def test_names_of_openings_that_are_not_there_are_told_with_their_number() -> None:
    openings = [
        {"phase": ["early", "*"], "blocks": "0-3"},
        {"class": "z", "phase": "lat", "blocks": "0-3"},
    ]
    names = ("blocks.0-3", "blocks.4-", "head", "tail")
    regions = Regions(names, (("a",), ("b",), ("h",), ("t",)), tuple((name,) for name in names), (), names)
    assert problems(policy_of([], depth=DEPTH | {"open": openings}), regions) == [
        "opening 2: no class 'z' in taxonomy t. There are: a/b/c, a/b/d, a/e, f.",
        "opening 2: no phase 'lat'; did you mean late?",
    ]


def test_what_is_wrong_in_a_file_is_told_with_its_line() -> None:
    text = """version: 1
taxonomy: s
regions: {head: {params: h}, tail: {params: t}}
bands: {measure: m, names: [low, high], thresholds: [0.5]}
measures: {trust: {grades: [low, high]}}
depth:
  container: blocks
  ranges: ["0-"]
  open:
    - {phase: x, blocks: 0-}
floors:
  - {class: a, band: low}
attenuate:
  - {class: a, measure: trust, grade: low, factor: 1}
rules:
  - {class: a, weight: 1}
"""
    names = ("blocks.0-", "head&tail")
    members = (("blocks.0-",), ("head", "tail"))
    merged = Regions(names, (("w",), ("h",)), members, (), ("blocks.0-", "head", "tail"))
    assert [told.split(":")[0] for told in problems(load_policy(text), merged)] == [
        "the policy is for taxonomy 's', and this is 't' (line 2)",
        "region head&tail (line 3) merges tied parameters, and allow.tied is false",
        "rule 1 (line 16)",
        "attenuation 1 (line 14)",
        "opening 1 (line 10)",
        "floor 1 (line 12)",
    ]
