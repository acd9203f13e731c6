"""Bands and floors: thresholds that are frozen, an axis of their own, and rows below a floor that nothing admits."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.routing.bands import Bands
from cosmati.routing.policy_analysis import diff, explain, heat_map_text
from cosmati.routing.policy_file import load_policy
from cosmati.train.past_policies import with_span
from tests.routing.samples import CLASSES, PARTITION, PHASES, REGIONS, TAXONOMY, compiled, policy_of, refusal
from tests.routing.test_policy_oracle import COVERS, PATTERN_RANK

BANDS = {"measure": "readability", "names": ["low", "middle", "high"], "thresholds": [0.3, 0.7]}
NAMES = ("low", "middle", "high")


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5, unique=True), st.floats())
def test_a_value_is_in_the_band_between_its_thresholds(thresholds: list[float], value: float) -> None:
    thresholds.sort()
    bands = Bands(measure="m", names=tuple(f"b{n}" for n in range(len(thresholds) + 1)), thresholds=tuple(thresholds))
    if math.isnan(value):
        with pytest.raises(ValueError, match="is no number"):
            bands.band_of(value)
    else:
        assert bands.band_of(value) == sum(value >= one for one in thresholds)


@pytest.mark.parametrize(
    ("bands", "why"),
    [
        ({"names": ["low", "low", "high"]}, "named twice"),
        ({"thresholds": [0.3]}, "3 bands need 2 thresholds"),
        ({"thresholds": [0.7, 0.3]}, "go up"),
        ({"thresholds": [0.3, 0.3]}, "go up"),
        ({"thresholds": [0.3, ".nan"]}, "valid number"),
        ({"thresholds": "[0.3, 1e999]"}, "finite number"),
        ({"names": ["low"], "thresholds": []}, "at least 2"),
        ({"measure": '""'}, "at least 1"),
    ],
)
def test_bands_that_are_none_are_refused(bands: dict[str, object], why: str) -> None:
    text = "version: 1\ntaxonomy: t\nrules: []\nbands:\n"
    with pytest.raises(PolicyError, match=rf"line [4-7], bands.*{why}"):
        load_policy(text + "".join(f"  {name}: {value}\n" for name, value in (BANDS | bands).items()).replace("'", '"'))


def test_policies_without_bands_have_the_digests_that_they_had() -> None:
    mapping = policy_of([{"class": "f", "weight": 1}]).to_mapping()
    assert not {"bands", "floors"} & {*mapping}
    assert mapping["rules"] == [{"class": ["f"], "phase": ["*"], "region": ["*"], "weight": 1.0}]


def test_thresholds_are_part_of_what_is_signed() -> None:
    first = policy_of([], bands=BANDS)
    assert first.digest != policy_of([], bands=BANDS | {"thresholds": [0.3, 0.71]}).digest
    assert first.digest != policy_of([], bands=BANDS | {"measure": "length"}).digest
    assert first.digest != policy_of([], bands=BANDS, floors=[{"class": "f", "band": "high"}]).digest


def some(names: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=1, max_size=2)


RULES = st.lists(
    st.fixed_dictionaries(
        {"class": some(tuple(COVERS)), "weight": st.sampled_from([0.25, 0.5, 1.0])},
        optional={"region": some((*REGIONS, "*")), "phase": some((*PHASES, "*")), "band": some((*NAMES, "*"))},
    ),
    max_size=4,
)
FLOORS = st.lists(st.fixed_dictionaries({"class": some(tuple(COVERS)), "band": st.sampled_from(NAMES)}), max_size=2)


@pytest.mark.long
@given(RULES, FLOORS)
def test_every_cell_agrees_with_an_oracle(rules: list[dict[str, object]], floors: list[dict[str, object]]) -> None:
    expected: dict[tuple[str, ...], set[object]] = {}
    for cell in product(CLASSES, NAMES, PHASES, REGIONS):
        found = []
        for rule in rules:
            axes = [rule["class"], *(rule.get(name, ["*"]) for name in ("band", "phase", "region"))]
            for pattern, *others in product(*axes):  # type: ignore[call-overload]
                if cell[0] in COVERS[pattern] and all(o in {c, "*"} for o, c in zip(others, cell[1:], strict=True)):
                    ranks = (PATTERN_RANK.get(pattern, 9), *(int(other != "*") for other in others))
                    found.append((ranks, rule["weight"]))
        expected[cell] = {
            said
            for mine, said in found
            if not any(them != mine and all(map(float.__ge__, map(float, them), map(float, mine))) for them, _ in found)
        }
    if any(len(said) > 1 for said in expected.values()):
        assert "is ambiguous" in refusal(rules, bands=BANDS, floors=floors)
        return
    table = compiled(rules, bands=BANDS, floors=floors)
    for (c, path), (b, band), (p, phase) in product(enumerate(CLASSES), enumerate(NAMES), enumerate(PHASES)):
        is_below = any(
            b < NAMES.index(str(floor["band"])) and any(path in COVERS[pattern] for pattern in floor["class"])  # type: ignore[attr-defined]
            for floor in floors
        )
        for r, region in enumerate(table.regions):
            said = expected[path, band, phase, region] if not is_below else set()
            assert table.route(c, (0, 5)[p], b)[r] == (said or {0.0}).pop()
        if is_below:
            assert table.decision[table.row(c, b)][p] == "reject"


RULE = [{"class": "f", "weight": 0.5}, {"class": "f", "band": "high", "weight": 1}]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bands": BANDS, "floors": [{"class": "f", "band": "hihg"}]}, "floor 1: no band 'hihg'; did you mean high"),
        ({"bands": BANDS, "floors": [{"class": "g", "band": "high"}]}, "floor 1: no class 'g'"),
        ({"floors": [{"class": "f", "band": "high"}]}, "floor 1: no band 'high'"),
        ({}, "rule 2: no band 'high'"),
    ],
)
def test_bands_that_are_not_there_are_refused(fields: dict[str, object], why: str) -> None:
    assert why in refusal(RULE, **fields)


def test_a_class_deferred_in_one_band_is_admitted_in_another() -> None:
    later: dict[str, object] = {"class": "f", "band": "low", "phase": "early", "decision": "defer"}
    table = compiled([*RULE, later], bands=BANDS)
    c = CLASSES.index("f")
    assert [table.decision[table.row(c, band)] for band in range(3)] == [
        ("defer", "gate"),
        ("gate", "gate"),
        ("admit", "admit"),
    ]
    with pytest.raises(PolicyError, match=r"are of kind 3, and the policy has 3: low, middle, high"):
        table.route(c, 0, 3)
    assert compiled(RULE[:1]).route(c, 0, 65535) == (0.5, 0.5), "without bands all are one"


def test_a_run_remembers_what_any_band_taught() -> None:
    only_high: list[dict[str, object]] = [{"class": "f", "region": "head", "band": "high", "weight": 1}]
    (span,) = with_span([], compiled(only_high, bands=BANDS), 0, 5)
    assert span["taught"] == {"a/b/c": [], "a/b/d": [], "a/e": [], "f": ["head"]}


def test_a_floor_is_explained_and_drawn() -> None:
    policy = policy_of(RULE, bands=BANDS, floors=[{"class": "f", "band": "middle"}])
    found = explain(policy, "f", "head", "late", "low", taxonomy=TAXONOMY)
    assert (found.result, found.why) == ("reject", "the band is below a floor of the class")
    assert explain(policy, "f", "head", "late", "high", taxonomy=TAXONOMY).weight == 1
    with pytest.raises(PolicyError, match="There's no band ''"):
        explain(policy, "f", "head", "late", taxonomy=TAXONOMY)
    drawn = heat_map_text(compiled(RULE, bands=BANDS, floors=[{"class": "f", "band": "middle"}]), "late")
    assert [line.split()[:3] for line in drawn.splitlines()[-3:]] == [
        ["f,", "low", "reject"],
        ["f,", "middle", "gate"],
        ["f,", "high", "admit"],
    ]


def test_diff_compares_bands_by_their_numbers() -> None:
    with_bands, without = compiled(RULE, bands=BANDS), compiled(RULE[:1])
    more = {(one.name, one.direction) for one in diff(without, with_bands)}
    assert more == {("f, high", "loosens"), ("f, above", "tightens")}
    less = {(one.name, one.direction) for one in diff(with_bands, without)}
    assert less == {("f, high", "tightens"), ("f, above", "loosens")}
    lower = compiled(RULE, bands=BANDS, floors=[{"class": "f", "band": "high"}])
    assert {(one.name, one.direction) for one in diff(with_bands, lower)} == {
        ("f, low", "tightens"),
        ("f, middle", "tightens"),
    }
    assert with_bands.partition == PARTITION
