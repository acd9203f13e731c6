"""A decider's rows are the rules' weights times what lowers them, cell by cell; what's unsound is told or refused."""

from __future__ import annotations

from itertools import product

import pytest

from cosmati.errors import PolicyError
from cosmati.routing.cells import Decider, Lowering, decide_cells
from cosmati.routing.measures import RowKind
from cosmati.routing.regions import Regions
from tests.routing.samples import CLASSES, MERGED, PARTITION, PHASES, REGIONS, policy_of
from tests.routing.test_bands import BANDS

Rules = list[dict[str, object]]
MEASURES = {"trust": {"grades": ["low", "high"]}}


def decider(rules: Rules, regions: Regions = PARTITION, **fields: object) -> Decider:
    return Decider(policy_of(rules, **fields), CLASSES, regions, PHASES)


def test_rules_that_disagree_are_refused_before_anything_is_decided() -> None:
    rules: Rules = [
        {"class": "f", "weight": 1, "region": "head"},
        {"class": "**", "weight": 0.5, "region": "head", "phase": "late"},
    ]
    with pytest.raises(PolicyError, match=r"disagree on \(f, head, late\): neither"):
        decider(rules)


def test_single_regions_of_weight_0_make_no_admitted_class() -> None:
    regional: Rules = [{"class": "f", "weight": 0, "region": region} for region in REGIONS]
    told = decider(regional)
    assert told.rows("f") == [(((0.0, 0.0), (0.0, 0.0)), ("reject", "reject"))]
    tail = "with weight 0 for every region, and would run and teach nothing: use decision: reject"
    assert told.problems == [f"f is admitted in phase {phase} {tail}" for phase in PHASES]
    for weights in ((0, 1), (1, 0)):
        fine = decider([rule | {"weight": weight} for rule, weight in zip(regional, weights, strict=True)])
        assert fine.rows("f")[0][1] == ("admit", "admit")
        assert fine.problems == []


def test_merged_regions_that_come_to_0_are_told() -> None:
    apart: Rules = [{"class": "f", "weight": 0, "region": "head"}, {"class": "f", "weight": 1, "region": "tail"}]
    told = decider(apart, MERGED)
    assert told.rows("f") == [(((0.0,), (0.0,)), ("reject", "reject"))]
    assert [problem.split(" with ")[0] for problem in told.problems] == [f"f is admitted in phase {p}" for p in PHASES]


def test_problems_gather_over_classes_in_the_order_of_asking() -> None:
    told = decider([{"class": "**", "weight": 0}])
    for path in ("f", "a/e"):
        told.rows(path)
    assert [problem.split(" is ")[0] for problem in told.problems] == ["f", "f", "a/e", "a/e"]


def test_each_cell_is_the_weight_of_its_rule_times_the_least_factor() -> None:
    """By hand: weights by region and band, factors by grade, region and phase; of a grade that's unknown, the worst."""
    weights = {("head", "low"): 0.5, ("head", "middle"): 1.0, ("head", "high"): 0.75}
    weights |= {("tail", "low"): 0.25, ("tail", "middle"): 0.0, ("tail", "high"): 1.0}
    rules: Rules = [
        {"class": "f", "region": region, "band": band, "weight": weight} for (region, band), weight in weights.items()
    ]
    factors = [("low", "head", "*", 0.5), ("low", "*", "late", 0.25), ("high", "tail", "early", 0.0)]
    attenuate = [
        {"class": "f", "measure": "trust", "grade": grade, "region": region, "phase": phase, "factor": factor}
        for grade, region, phase, factor in factors
    ]
    policy = policy_of(rules, bands=BANDS, measures=MEASURES, attenuate=attenuate)
    for regions in (PARTITION, MERGED):
        rows = Decider(policy, CLASSES, regions, PHASES).rows("f")
        assert len(rows) == len(policy.kinds) == 9
        for kind, (routes, decisions) in zip(policy.kinds, rows, strict=True):
            grade = dict(kind.grades)["trust"]
            for phase, route, decision in zip(PHASES, routes, decisions, strict=True):
                lowered = dict.fromkeys(REGIONS, 0.0)
                for region in REGIONS:
                    of_cell = [
                        f for g, r, p, f in factors if grade in ("", g) and r in ("*", region) and p in ("*", phase)
                    ]
                    lowered[region] = weights[region, kind.band] * min([*of_cell, 1.0])
                assert route == tuple(min(lowered[name] for name in names) for names in regions.members)
                partly = any(0 < weight < 1 for weight in route)
                assert decision == ("gate" if partly else "admit" if any(route) else "reject")


def test_rows_that_the_same_attenuations_cover_are_one() -> None:
    attenuate = [{"class": "f", "measure": "trust", "grade": "low", "factor": 0.5}]
    grades = {"trust": {"grades": ["low", "middle", "high"]}}
    policy = policy_of([{"class": "f", "weight": 1}], measures=grades, attenuate=attenuate)
    found = Decider(policy, CLASSES, PARTITION, PHASES).rows("f")
    rows = dict(zip((kind.grades[0][1] for kind in policy.kinds), found, strict=True))
    assert rows["middle"] is rows["high"]
    assert rows["low"] is rows[""]
    assert rows["low"] == (((0.5, 0.5), (0.5, 0.5)), ("gate", "gate"))
    assert rows["high"] == (((1.0, 1.0), (1.0, 1.0)), ("admit", "admit"))


def test_blocks_learn_nothing_until_they_are_opened() -> None:
    depth = {"container": "blocks", "ranges": ["0-3", "4-"], "open": [{"phase": "early", "blocks": "4-"}]}
    regions = ("blocks.0-3", "blocks.4-")
    cut = Regions(regions, (("l",), ("u",)), tuple((name,) for name in regions), (), regions)
    policy = policy_of([{"class": "f", "weight": 1}], depth=depth)
    assert Decider(policy, CLASSES, cut, PHASES).rows("f") == [(((0.0, 1.0), (1.0, 1.0)), ("admit", "admit"))]
    lowering = Lowering(policy)
    for phase, region in product(PHASES, (*regions, "head")):
        closed = phase == "early" and region == "blocks.0-3"
        assert lowering.factor("f", RowKind(), phase, region) == (0.0 if closed else 1.0)


def test_a_front_that_agrees_is_told_by_its_first_rule() -> None:
    rules: Rules = [{"class": "f", "decision": "defer"}, {"class": "**", "decision": "defer", "phase": "late"}]
    cells = decide_cells(policy_of(rules), CLASSES, REGIONS)
    assert [match.number for match in cells.front("f", "head", "late", "")] == [1, 2]
    assert cells.outcome("f", "head", "late", "") == ("defer", 0.0)
