"""Rows of several classes: cell by cell the least of their weights, found without the library's combination."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.records.joint_classes import ids_with, joint_name, members_of
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.routing.policy_analysis import diff, explain
from cosmati.routing.tightening import without_class
from tests.routing.samples import CLASSES, PARTITION, PHASES, REGIONS, TAXONOMY, policy_of
from tests.routing.test_measures import ATTENUATIONS, MEASURES
from tests.routing.test_policy_oracle import RULES, oracle_table

SETS = st.lists(st.sets(st.sampled_from(CLASSES), min_size=2), min_size=1, max_size=3)


def compiled(rules: list[dict[str, Any]], joint: list[str], **fields: Any) -> CompiledPolicy:
    policy = policy_of(rules, **fields)
    return compile_policy(policy, taxonomy=TAXONOMY, regions=PARTITION, num_steps=10, joint=joint)


@pytest.mark.long
@given(RULES, ATTENUATIONS, SETS)
def test_each_cell_is_the_least_of_its_classes(
    rules: list[dict[str, Any]], attenuations: list[dict[str, Any]], sets: list[set[str]]
) -> None:
    if oracle_table(rules) is None:
        return
    joint = ["&".join(sorted(one, reverse=True)) for one in sets]
    table = compiled(rules, joint, measures=MEASURES, attenuate=attenuations)
    alone = compiled(rules, [], measures=MEASURES, attenuate=attenuations)
    assert table.classes[: len(CLASSES)] == CLASSES
    assert table.weight[: len(alone.weight)] == alone.weight
    for own, kind in product(sets, range(12)):
        row = table.row(table.classes.index("&".join(sorted(own))), kind)
        rows = [alone.row(CLASSES.index(name), kind) for name in own]
        left = []
        for p in range(2):
            route = tuple(min(alone.weight[one][p][r] for one in rows) for r in range(2))
            assert table.weight[row][p] == route
            left.append(any(route))
        for p in range(2):
            said = {alone.decision[one][p] for one in rows}
            if "reject" in said:
                expected = "reject"
            elif "defer" in said:
                expected = "defer" if any(left[p:]) else "reject"
            elif not left[p]:
                expected = "reject"
            else:
                expected = "gate" if any(0 < weight < 1 for weight in table.weight[row][p]) else "admit"
            assert table.decision[row][p] == expected


def test_what_is_amplified_for_one_class_alone_isnt() -> None:
    rules = [{"class": "f", "weight": 2}, {"class": "a/e", "weight": 3}, {"class": "a/b/c", "weight": 0.5}]
    table = compiled(rules, ["f&a/e", "a/b/c&f", "a/b/c&a/b/d"], allow={"amplify": True})
    found = {name: table.route(table.classes.index(name), 0)[0] for name in table.classes[4:]}
    assert found == {"a/b/c&a/b/d": 0, "a/b/c&f": 0.5, "a/e&f": 2}
    assert table.decision[4] == ("reject", "reject")


def test_a_class_that_isnt_there_is_refused() -> None:
    with pytest.raises(PolicyError, match="rows are of class 'f&g', and there's no class 'g'"):
        compiled([], ["f&g"])


@given(st.lists(st.sets(st.sampled_from(CLASSES), min_size=1), min_size=1, max_size=3))
def test_a_name_is_that_of_the_set(sets: list[set[str]]) -> None:
    name = joint_name(["&".join(one) for one in sets])
    assert members_of(name) == tuple(sorted(set().union(*sets)))
    assert ids_with([*CLASSES, "a/e&f"], "f") == [3, 4]


def test_a_class_that_is_taken_away_is_taken_from_rows_of_others_too() -> None:
    table = without_class(compiled([{"class": "**", "weight": 1}], ["a/e&f", "a/b/c&a/e"]), CLASSES.index("f"), 5)
    gone = {name for c, name in enumerate(table.classes) if table.decision[c][-1] == "reject"}
    assert gone == {"f", "a/e&f"}
    assert table.decision[table.classes.index("a/e&f")][0] == "admit"


def test_what_changes_of_them_is_told() -> None:
    old, new = (compiled([{"class": "**", "weight": 1}, {"class": "f", "weight": w}], ["a/e&f"]) for w in (0.5, 1))
    assert [one.class_path for one in diff(old, new)] == ["f", "f", "a/e&f", "a/e&f"]


def test_a_cell_of_them_is_explained_by_the_least() -> None:
    policy = policy_of([{"class": "**", "weight": 1}, {"class": "f", "region": "head", "weight": 0.5}])
    found = explain(policy, "a/e&f", "head", "late", taxonomy=TAXONOMY)
    assert (found.class_path, found.weight) == ("a/e&f", 0.5)
    assert "that's f's" in found.why
    assert explain(policy, "a/e&f", "tail", "late", taxonomy=TAXONOMY).weight == 1
    with pytest.raises(PolicyError, match="no class 'g'"):
        explain(policy, "a/e&g", "tail", "late", taxonomy=TAXONOMY)
    assert (REGIONS, PHASES) == (("head", "tail"), ("early", "late"))


def test_who_waits_and_who_is_rejected() -> None:
    late = {"phase": "late", "weight": 1}
    rules: list[dict[str, Any]] = [
        {"class": "f", "phase": "early", "decision": "defer"},
        {"class": "f", **late},
        {"class": "a/e", "weight": 1},
        {"class": "a/b/c", **late},
    ]
    table = compiled(rules, ["a/e&f", "a/b/c&f"])
    assert table.decision[table.classes.index("a/e&f")] == ("defer", "admit"), "one waits, and so do both"
    assert table.decision[table.classes.index("a/b/c&f")] == ("reject", "admit"), "one is rejected, and so are both"
    policy = policy_of([*rules, {"class": "a/b/d", "region": "head", "weight": 0}, {"class": "a/b/d", **late}])
    found = explain(policy, "a/b/d&f", "head", "early", taxonomy=TAXONOMY)
    assert (found.result, "that's f's" in found.why) == ("defer", True)
