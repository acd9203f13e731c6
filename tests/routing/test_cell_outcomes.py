"""What rules come to in each cell, what lowers it, and what isn't sound about it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cosmati.errors import PolicyError
from cosmati.routing.cells import (
    Cells,
    Decider,
    Lowering,
    PolicyRow,
    combined,
    decide_cells,
    decision_of,
    of_band,
    refuse,
)
from cosmati.routing.measures import RowKind
from cosmati.routing.policy_file import load_policy
from cosmati.routing.regions import Regions
from cosmati.routing.rules import front, matching_rules
from tests.routing.samples import CLASSES, MERGED, PARTITION, PHASES, REGIONS, policy_of
from tests.routing.test_bands import BANDS, NAMES
from tests.routing.test_measures import MEASURES

RULES: list[dict[str, object]] = [
    {"class": "**", "weight": 0.5},
    {"class": "a/**", "weight": 1, "region": "head"},
    {"class": "a/b/c", "weight": 0.25, "phase": "late", "band": "low"},
    {"class": "f", "weight": 0, "region": "tail", "band": ["low", "high"]},
    {"class": "a/e", "decision": "defer", "phase": "early"},
    {"class": "a/b/c", "weight": 2, "region": "head", "phase": "late", "band": "low"},
]


def decider(rules: list[dict[str, object]], regions: Regions = PARTITION, **fields: object) -> Decider:
    return Decider(policy_of(rules, **fields), CLASSES, regions, PHASES)


# Cells.


def test_fronts_are_those_of_all_rules_in_any_order_of_asking() -> None:
    policy = policy_of(RULES, bands=BANDS, allow={"amplify": True})
    asked = list(product(CLASSES, REGIONS, PHASES, NAMES))
    for order in (asked, asked[::-1]):
        cells = Cells(policy, REGIONS)
        for path, region, phase, band in order:
            expected = front(matching_rules(policy.rules, path, region, phase, band))
            assert cells.front(path, region, phase, band) == expected
            outcome = expected[0].outcome if expected else ("reject", 0.0)
            assert cells.outcome(path, region, phase, band) == outcome


def test_cells_that_no_rule_of_a_class_tells_apart_are_one() -> None:
    cells = Cells(policy_of(RULES, bands=BANDS, allow={"amplify": True}), REGIONS)
    first = cells.front("f", "head", "early", "low")
    assert cells.front("f", "head", "late", "low") is first
    assert cells.front("f", "head", "late", "middle") is not first
    assert cells.front("f", "tail", "late", "low") is not first


def test_a_cell_that_no_rule_covers_is_rejected() -> None:
    cells = Cells(policy_of([{"class": "f", "weight": 1, "region": "head"}]), REGIONS)
    assert cells.front("f", "tail", "early", "") == []
    assert cells.outcome("f", "tail", "early", "") == ("reject", 0.0)
    assert cells.outcome("f", "head", "early", "") == ("weight", 1.0)


TEXT = """version: 1
taxonomy: t
regions: {head: {params: h}, tail: {params: t}}
phases: [{name: early, until: 0.5dur}, {name: late}]
rules:
  - {class: f, weight: 1, region: tail}
  - {class: f, weight: 0, region: head}
  - {class: a/e, decision: defer, phase: early}
  - {class: a/e, weight: 1, region: head, phase: early}
  - {class: a/b/c, weight: 0}
"""


def test_the_line_is_of_the_first_rule_ahead_that_says_so() -> None:
    cells = Cells(load_policy(TEXT), REGIONS)
    assert cells.where("f", "early", "", "weight") == " (line 6)"
    assert cells.where("f", "early", "", "defer") == ""
    assert cells.where("a/e", "early", "", "defer") == " (line 8)"
    assert cells.where("a/e", "late", "", "defer") == ""
    assert Cells(policy_of(RULES[:4]), REGIONS).where("f", "early", "", "weight") == ""


def decided(path: str, phase: str, route: tuple[float, ...]) -> tuple[str, list[str]]:
    problems: list[str] = []
    return Cells(load_policy(TEXT), REGIONS).decide(path, phase, "", route, problems), problems


def test_a_class_is_deferred_for_all_regions_or_none() -> None:
    deferred = Cells(policy_of([{"class": "f", "decision": "defer"}]), REGIONS)
    problems: list[str] = []
    assert deferred.decide("f", "early", "", (0.0, 0.0), problems) == "defer"
    assert problems == []
    assert decided("a/e", "early", (0.0, 1.0)) == (
        "defer",
        [
            (
                "a/e is deferred in phase early (line 8), but rules for single regions say otherwise; a class is "
                "deferred for all regions or none"
            )
        ],
    )


def test_a_class_with_weight_0_everywhere_is_no_admitted_one() -> None:
    assert decided("a/b/c", "late", (0.0, 0.0)) == (
        "reject",
        [
            (
                "a/b/c is admitted in phase late with weight 0 for every region (line 10), and would run and teach "
                "nothing: use decision: reject"
            )
        ],
    )
    assert decided("a/b/d", "late", (0.0, 0.0)) == ("reject", [])
    assert decided("f", "late", (1.0, 0.0)) == ("admit", [])
    assert decided("f", "late", (0.5, 0.0)) == ("gate", [])


def test_problems_name_the_band() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 0},
        {"class": "a/e", "decision": "defer"},
        {"class": "a/e", "weight": 1, "region": "head"},
    ]
    cells, problems = Cells(policy_of(rules, bands=BANDS), REGIONS), list[str]()
    assert cells.decide("f", "early", "low", (0.0, 0.0), problems) == "reject"
    assert problems[0].startswith("f, band low, is admitted in phase early with weight 0")
    assert cells.decide("a/e", "early", "high", (0.0, 1.0), problems) == "defer"
    assert problems[1].startswith("a/e, band high, is deferred in phase early, but")


@pytest.mark.parametrize(
    ("route", "decision"),
    [
        ((), "reject"),
        ((0.0, 0.0), "reject"),
        ((0.0, 1.0), "admit"),
        ((1.0, 1.0), "admit"),
        ((2.0, 0.0), "admit"),
        ((2.0, 0.5), "gate"),
        ((0.0, 1e-9), "gate"),
        ((1.0, 0.999), "gate"),
    ],
)
def test_a_weight_between_0_and_1_makes_a_gate(route: tuple[float, ...], decision: str) -> None:
    assert decision_of(route) == decision


def test_a_band_in_words_stands_between_commas() -> None:
    assert (of_band(""), of_band("low")) == ("", ", band low,")


# What lowers weights.

ATTENUATE = [
    {"class": "a/**", "measure": "evidence", "grade": ["report", "trial"], "factor": 0.5},
    {"class": "**", "measure": "trust", "grade": "low", "factor": 0.25, "region": "head"},
    {"class": "f", "measure": "trust", "grade": "high", "factor": 0.75, "phase": "late"},
]


def kind(evidence: str = "review", trust: str = "high", band: str = "") -> RowKind:
    return RowKind(band, (("evidence", evidence), ("trust", trust)))


def test_attenuations_cover_rows_of_their_grades_and_those_that_were_not_measured() -> None:
    lowering = Lowering(policy_of([], measures=MEASURES, attenuate=ATTENUATE))
    assert [number for number, _ in lowering.of_class("a/e")] == [1, 2]
    assert [number for number, _ in lowering.of_class("f")] == [2, 3]
    assert lowering.of_class("f") is lowering.of_class("f")
    assert lowering.covering_kind("a/e", kind("report", "low")) == (1, 2)
    assert lowering.covering_kind("a/e", kind("review", "low")) == (2,)
    assert lowering.covering_kind("a/e", kind("", "")) == (1, 2)
    assert lowering.covering_kind("f", kind("", "")) == (2, 3)
    assert lowering.covering_kind("f", kind("report", "high")) == (3,)


def test_an_attenuation_is_of_its_regions_and_phases() -> None:
    lowering = Lowering(policy_of([], measures=MEASURES, attenuate=ATTENUATE))

    def numbers(path: str, one: RowKind, phase: str, region: str) -> list[int]:
        return [number for number, _ in lowering.covering(path, one, phase, region)]

    assert numbers("a/e", kind("trial", "low"), "early", "head") == [1, 2]
    assert numbers("a/e", kind("trial", "low"), "early", "tail") == [1]
    assert numbers("f", kind("trial", "high"), "late", "tail") == [3]
    assert numbers("f", kind("trial", "high"), "early", "tail") == []
    assert numbers("f", kind("trial", "low"), "late", "head") == [2]


def test_the_least_factor_counts_and_1_where_there_is_none() -> None:
    lowering = Lowering(policy_of([], measures=MEASURES, attenuate=ATTENUATE))
    assert lowering.factor("a/e", kind("trial", "low"), "early", "head") == 0.25
    assert lowering.factor("a/e", kind("trial", "low"), "early", "tail") == 0.5
    assert lowering.factor("a/e", kind("review", "high"), "early", "head") == 1.0
    assert lowering.concerns("f")
    assert not Lowering(policy_of([])).concerns("f")
    alone = Lowering(policy_of([], measures=MEASURES, attenuate=ATTENUATE[:1]))
    assert [alone.concerns(path) for path in CLASSES] == [True, True, True, False]


OPEN = [
    {"phase": "early", "blocks": "4-"},
    {"class": "f", "phase": "*", "blocks": "0-3"},
]
DEPTH = {"container": "blocks", "ranges": ["0-3", "4-"], "open": OPEN}


def test_an_opening_closes_the_ranges_that_it_does_not_name() -> None:
    lowering = Lowering(policy_of([], depth=DEPTH))

    def numbers(path: str, phase: str, region: str) -> list[int]:
        return [number for number, _ in lowering.closing(path, phase, region)]

    for _ in range(2):  # Asked again, it's the same.
        assert numbers("a/e", "early", "blocks.0-3") == [1]
        assert numbers("a/e", "early", "blocks.4-") == []
        assert numbers("a/e", "late", "blocks.0-3") == []
        assert numbers("f", "early", "blocks.0-3") == [1]
        assert numbers("f", "early", "blocks.4-") == [2]
        assert numbers("f", "late", "blocks.4-") == [2]
        assert numbers("f", "late", "blocks.0-3") == []
        assert numbers("f", "late", "head") == []
    assert Lowering(policy_of([])).closing("f", "early", "head") == []
    assert lowering.factor("f", "", "late", "blocks.4-") == 0.0  # type: ignore[arg-type]
    assert lowering.factor("f", RowKind(), "late", "blocks.0-3") == 1.0


def test_openings_concern_the_classes_that_they_are_for() -> None:
    alone = Lowering(policy_of([], depth=DEPTH | {"open": OPEN[1:]}))
    assert [alone.concerns(path) for path in CLASSES] == [False, False, False, True]
    assert all(Lowering(policy_of([], depth=DEPTH)).concerns(path) for path in CLASSES)


# What a decider comes to.


def test_weights_and_decisions_are_by_phase_and_region() -> None:
    found = decider(
        [
            {"class": "f", "weight": 0.5, "region": "head"},
            {"class": "f", "weight": 1, "region": "tail", "phase": "late"},
            {"class": "a/e", "weight": 1},
        ]
    )
    # Regions in the order of the partition: tail, head.
    assert found.rows("f") == [(((0.0, 0.5), (1.0, 0.5)), ("gate", "gate"))]
    assert found.rows("a/e") == [(((1.0, 1.0), (1.0, 1.0)), ("admit", "admit"))]
    assert found.rows("a/b/c") == [(((0.0, 0.0), (0.0, 0.0)), ("reject", "reject"))]
    assert found.problems == []


def test_merged_regions_learn_as_little_as_the_least_of_their_members() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 0.5, "region": "head"},
        {"class": "f", "weight": 1, "region": "tail"},
    ]
    assert decider(rules, MERGED).rows("f")[0][0] == ((0.5,), (0.5,))


def test_a_deferred_class_wants_a_later_phase_that_admits_it() -> None:
    later: list[dict[str, object]] = [
        {"class": "f", "decision": "defer", "phase": "early"},
        {"class": "f", "weight": 1, "phase": "late"},
    ]
    fine = decider(later)
    assert fine.rows("f") == [(((0.0, 0.0), (1.0, 1.0)), ("defer", "admit"))]
    assert fine.problems == []
    gated = decider([later[0], later[1] | {"weight": 0.5}])
    assert gated.rows("f")[0][1] == ("defer", "gate")
    assert gated.problems == []
    tail = ", and no later phase admits it: give it a weight there, or reject it"
    for rules, expected in (
        (later[:1], [f"f is deferred in phase early{tail}"]),
        (
            [{"class": "f", "decision": "defer"}],
            [f"f is deferred in phase early{tail}", f"f is deferred in phase late{tail}"],
        ),
        (
            [{"class": "f", "weight": 1, "phase": "early"}, {"class": "f", "decision": "defer", "phase": "late"}],
            [f"f is deferred in phase late{tail}"],
        ),
    ):
        lost = decider(rules)
        lost.rows("f")
        assert lost.problems == expected
    banded = decider(later[:1], bands=BANDS)
    banded.rows("f")
    assert banded.problems[0] == f"f, band low, is deferred in phase early{tail}"


def test_the_line_of_a_deferral_is_told() -> None:
    text = TEXT.replace("  - {class: a/e, weight: 1, region: head, phase: early}\n", "")
    found = Decider(load_policy(text), CLASSES, PARTITION, PHASES)
    found.rows("a/e")
    assert found.problems[0].startswith("a/e is deferred in phase early (line 8), and no later phase admits it")


def test_bands_below_a_floor_are_rejected_whatever_rules_say() -> None:
    rules: list[dict[str, object]] = [{"class": "f", "weight": 1}]
    found = decider(rules, bands=BANDS, floors=[{"class": "f", "band": "middle"}]).rows("f")
    nothing = (((0.0, 0.0), (0.0, 0.0)), ("reject", "reject"))
    everything = (((1.0, 1.0), (1.0, 1.0)), ("admit", "admit"))
    assert found == [nothing, everything, everything]
    merged = decider(rules, MERGED, bands=BANDS, floors=[{"class": "f", "band": "high"}]).rows("f")
    assert merged[:2] == [(((0.0,), (0.0,)), ("reject", "reject"))] * 2


def test_factors_lower_the_weights_of_a_kind_of_rows() -> None:
    found = decider(
        [{"class": "**", "weight": 0.5}, {"class": "f", "weight": 1, "band": "high"}],
        bands=BANDS,
        measures={"trust": {"grades": ["low", "high"]}},
        attenuate=[
            {"class": "f", "measure": "trust", "grade": "low", "factor": 0.5, "region": "head"},
            {"class": "f", "measure": "trust", "grade": "high", "factor": 0.0, "phase": "late"},
        ],
    )
    kinds = policy_of([], bands=BANDS, measures={"trust": {"grades": ["low", "high"]}}).kinds
    rows = dict(zip(kinds, found.rows("f"), strict=True))
    for one, (routes, decisions) in rows.items():
        base, grade = 1.0 if one.band == "high" else 0.5, dict(one.grades)["trust"]
        head = base * (0.5 if grade in ("", "low") else 1.0)
        late = 0.0 if grade in ("", "high") else 1.0
        assert routes == ((base, head), (base * late, head * late))
        expected = [
            "gate" if any(0 < w < 1 for w in route) else "admit" if any(route) else "reject" for route in routes
        ]
        assert list(decisions) == expected
    assert set(found.rows("a/e")) == {(((0.5, 0.5), (0.5, 0.5)), ("gate", "gate"))}


def test_what_is_deferred_waits_only_for_weights_that_are_left() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "decision": "defer", "phase": "early"},
        {"class": "f", "weight": 1, "phase": "late"},
    ]
    measures = {"trust": {"grades": ["low", "high"]}}
    attenuate = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0.0}]
    found = decider(rules, measures=measures, attenuate=attenuate)
    kinds = policy_of([], measures=measures).kinds
    for one, (routes, decisions) in zip(kinds, found.rows("f"), strict=True):
        is_gone = dict(one.grades)["trust"] in ("", "low")
        assert routes == ((0.0, 0.0), (0.0, 0.0) if is_gone else (1.0, 1.0))
        assert decisions == (("reject", "reject") if is_gone else ("defer", "admit"))
    assert found.problems == []


def test_a_weight_that_came_before_is_none_to_wait_for() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 1, "phase": "one"},
        {"class": "f", "decision": "defer", "phase": "two"},
        {"class": "f", "weight": 1, "phase": "three"},
    ]
    phases = [{"name": "one", "until": "1ba"}, {"name": "two", "until": "2ba"}, {"name": "three"}]
    measures = {"trust": {"grades": ["low", "high"]}}
    attenuate = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0.0, "phase": "three"}]
    policy = policy_of(rules, phases=phases, measures=measures, attenuate=attenuate)
    found = Decider(policy, CLASSES, PARTITION, policy.phase_names)
    by_grade = {dict(one.grades)["trust"]: row[1] for one, row in zip(policy.kinds, found.rows("f"), strict=True)}
    assert by_grade == {
        "": ("admit", "reject", "reject"),
        "low": ("admit", "reject", "reject"),
        "high": ("admit", "defer", "admit"),
    }


def test_kinds_that_the_same_attenuations_cover_are_one_row() -> None:
    found = decider(
        [{"class": "**", "weight": 1}],
        measures=MEASURES,
        attenuate=[{"class": "f", "measure": "evidence", "grade": "report", "factor": 0.5}],
    ).rows("f")
    kinds = policy_of([], measures=MEASURES).kinds
    lowered = {id(row) for one, row in zip(kinds, found, strict=True) if dict(one.grades)["evidence"] in ("", "report")}
    others = {id(row) for one, row in zip(kinds, found, strict=True) if dict(one.grades)["evidence"] == "trial"}
    assert (len(lowered), len(others), len({*map(id, found)})) == (1, 1, 2)


# Rows of several classes.


def row(*phases: tuple[tuple[float, ...], Any]) -> PolicyRow:
    return tuple(weights for weights, _ in phases), tuple(decision for _, decision in phases)


def test_rows_of_several_classes_have_the_least_weights() -> None:
    one = [row(((1.0, 0.5), "gate"), ((1.0, 2.0), "admit")), row(((1.0, 1.0), "admit"), ((0.0, 0.0), "reject"))]
    other = [row(((0.25, 1.0), "gate"), ((1.0, 1.5), "admit")), row(((0.0, 1.0), "admit"), ((1.0, 1.0), "admit"))]
    assert combined([one, other]) == [
        row(((0.25, 0.5), "gate"), ((1.0, 1.5), "admit")),
        row(((0.0, 1.0), "admit"), ((0.0, 0.0), "reject")),
    ]
    assert combined([one, one]) == combined([one]) == one


def test_rows_of_several_classes_wait_while_one_is_deferred_none_is_rejected_and_something_is_left() -> None:
    deferred = [row(((0.0,), "defer"), ((1.0,), "admit"))]
    admitted = [row(((1.0,), "admit"), ((1.0,), "admit"))]
    rejected = [row(((0.0,), "reject"), ((1.0,), "admit"))]
    gone = [row(((1.0,), "admit"), ((0.0,), "reject"))]
    assert combined([deferred, admitted])[0][1] == ("defer", "admit")
    assert combined([admitted, deferred])[0][1] == ("defer", "admit")
    assert combined([deferred, rejected])[0][1] == ("reject", "admit")
    assert combined([deferred, gone])[0][1] == ("reject", "reject")
    # A weight before that is none to wait for.
    later = [row(((1.0,), "admit"), ((0.0,), "defer"), ((1.0,), "admit"))]
    ended = [row(((1.0,), "admit"), ((1.0,), "admit"), ((0.0,), "reject"))]
    assert combined([later, ended])[0][1] == ("admit", "reject", "reject")


# Rules that disagree.


def refusal(rules: list[dict[str, object]], **fields: object) -> str:
    with pytest.raises(PolicyError) as caught:
        decide_cells(policy_of(rules, **fields), CLASSES, REGIONS)
    return str(caught.value)


def test_rules_that_disagree_are_told_once_with_their_first_cell() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 1},
        {"class": "**", "weight": 0.5, "region": "head", "phase": "late"},
    ]
    one, other = "rule 1 (class f: weight 1)", "rule 2 (class **, region head, phase late: weight 0.5)"
    mend = "neither is more specific. Add a rule for these cells"
    assert refusal(rules) == f"The policy is ambiguous:\n  - {one} and {other} disagree on (f, head, late): {mend}"
    wide = refusal([rules[0], {"class": "**", "weight": 0.5, "phase": "late"}])
    assert "disagree on (f, head, late) and 1 more cells: neither" in wide
    banded = refusal(rules, bands=BANDS)
    assert "disagree on (f, head, late, low) and 2 more cells: neither" in banded


def test_a_deferral_that_is_disagreed_with_is_mended_by_phases() -> None:
    for rules in (
        [{"class": "f", "decision": "defer"}, {"class": "**", "weight": 1, "phase": "late"}],
        [{"class": "**", "weight": 1, "phase": "late"}, {"class": "f", "decision": "defer"}],
    ):
        assert refusal(rules).endswith("neither is more specific. Name the phases that the other rule is for")


def test_lines_of_rules_that_disagree_are_told() -> None:
    text = TEXT + "  - {class: f, weight: 0.5, region: tail}\n"
    with pytest.raises(PolicyError, match=r"weight 1\) \(line 6\) and rule 6 .*weight 0\.5\) \(line 11\) disagree"):
        decide_cells(load_policy(text), CLASSES, REGIONS)


def test_rules_that_agree_decide_their_cells() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 1},
        {"class": "**", "weight": 1, "phase": "late"},
    ]
    assert decide_cells(policy_of(rules), CLASSES, REGIONS).outcome("f", "head", "late", "") == ("weight", 1.0)


def test_problems_are_refused_each_once_and_in_order() -> None:
    refuse([], "is bad")
    refuse(iter(()), "is bad")
    with pytest.raises(PolicyError) as caught:
        refuse(["b", "a", "b"], "is bad")
    assert str(caught.value) == "The policy is bad:\n  - b\n  - a"
