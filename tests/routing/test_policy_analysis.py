"""Explanations, differences, tables and heat maps of policies."""

from __future__ import annotations

from itertools import product
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import CompiledPolicy, compile_policy
from cosmati.routing.policy_analysis import CellChange, diff, explain, heat_map_text
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.regions import Regions

TAXONOMY = Taxonomy("t", "1", (("a/b", ""), ("a/c", ""), ("d", "")))
REGIONS = Regions(("tail", "head"), (("t",), ("h", "i")), (("tail",), ("head",)), (), ("head", "tail"))
NUM_STEPS = 10


def policy_of(rules: list[dict[str, object]], until: str = "5ba", **fields: object) -> PolicyFile:
    document = {
        "version": 1,
        "taxonomy": "t",
        "regions": {"head": {"params": ["h", "i"]}, "tail": {"params": "t"}},
        "phases": [{"name": "early", "until": until}, {"name": "late"}],
        "rules": rules,
    }
    return PolicyFile.model_validate(document | fields)


def compiled(policy: PolicyFile, regions: Regions = REGIONS, taxonomy: Taxonomy = TAXONOMY) -> CompiledPolicy:
    return compile_policy(policy, taxonomy=taxonomy, regions=regions, num_steps=NUM_STEPS)


RULES: list[dict[str, object]] = [
    {"class": "a/**", "weight": 1},
    {"class": "a/b", "region": "tail", "weight": 0.5},
    {"class": "**", "weight": 0.25},
    {"class": "d", "phase": "early", "decision": "defer"},
]


def test_explanations_name_the_winner_and_all_considered() -> None:
    found = explain(policy_of(RULES), "a/b", "tail", "early", taxonomy=TAXONOMY)
    assert found.considered == (
        "rule 2 (class a/b, region tail: weight 0.5)",
        "rule 1 (class a/**: weight 1)",
        "rule 3 (class **: weight 0.25)",
    )
    assert found.winner == found.considered[0]
    assert (found.result, found.weight) == ("weight", 0.5)
    assert "as specific as each of the others" in found.why


def test_explanations_of_other_outcomes() -> None:
    deferred = explain(policy_of(RULES), "d", "head", "early", taxonomy=TAXONOMY)
    assert (deferred.result, deferred.weight) == ("defer", 0.0)
    nothing = explain(policy_of([]), "d", "head", "late", taxonomy=TAXONOMY)
    assert (nothing.winner, nothing.result, nothing.considered) == (None, "reject", ())
    assert "default is reject" in nothing.why
    alone = explain(policy_of(RULES[:1]), "a/c", "head", "late", taxonomy=TAXONOMY)
    assert "only rule" in alone.why
    agreed = explain(
        policy_of([{"class": "d", "weight": 1}, {"class": "**", "region": "head", "weight": 1}]),
        "d",
        "head",
        "late",
        taxonomy=TAXONOMY,
    )
    assert agreed.winner == "rule 1 (class d: weight 1)"
    assert "(rule 2) says the same" in agreed.why


def test_every_explanation_agrees_with_the_compiled_weight() -> None:
    policy = policy_of(RULES)
    table = compiled(policy)
    cells = list(product(enumerate(table.classes), enumerate(table.phases), enumerate(table.regions)))
    assert [table.weight[c][p][r] for (c, _), (p, _), (r, _) in cells[:4]] == [0.5, 1.0, 0.5, 1.0]
    for (c, path), (p, phase), (r, region) in cells:
        assert explain(policy, path, region, phase.name, taxonomy=TAXONOMY).weight == table.weight[c][p][r]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (("a", "head", "late"), "no class 'a'"),
        (("d", "heat", "late"), "no region 'heat'; did you mean head"),
        (("d", "head&tail", "late"), "minimum of its members"),
        (("d", "head", "later"), "no phase 'later'; did you mean late"),
    ],
)
def test_unknown_cells_are_refused(cell: tuple[str, str, str], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        explain(policy_of(RULES), *cell, taxonomy=TAXONOMY)


def test_conflicts_are_refused() -> None:
    policy = policy_of([{"class": "d", "weight": 1}, {"class": "d", "weight": 0.5}])
    with pytest.raises(PolicyError, match=r"rule 1 .* and rule 2 .* disagree on \(d, head, late\)"):
        explain(policy, "d", "head", "late", taxonomy=TAXONOMY)


def test_diff_of_equal_policies_is_empty() -> None:
    one = compiled(policy_of(RULES))
    assert diff(one, compiled(policy_of(list(reversed(RULES))))) == ()


def test_diff_names_cells_and_directions() -> None:
    old = compiled(policy_of(RULES))
    changed: list[dict[str, object]] = [RULES[0], {"class": "a/b", "region": "tail", "weight": 0}, RULES[2]]
    changes = diff(old, compiled(policy_of(changed)))
    assert changes == (
        CellChange("a/b", "tail", "tail", 0, 10, 0.5, 0.0, "gate", "admit"),
        CellChange("d", "tail", "tail", 0, 5, 0.0, 0.25, "defer", "gate"),
        CellChange("d", "head", "head", 0, 5, 0.0, 0.25, "defer", "gate"),
    )
    assert [change.direction for change in changes] == ["tightens", "loosens", "loosens"]
    assert str(changes[0]) == "tightens: a/b, tail, steps 0 to 10: 0.5 (gate) -> 0 (admit)"


def test_diff_sees_a_moved_phase_border() -> None:
    """The same names and weights, other steps: a comparison by name would find nothing."""
    rules: list[dict[str, object]] = [
        {"class": "d", "weight": 1},
        {"class": "d", "phase": "early", "weight": 0.5},
    ]
    changes = diff(compiled(policy_of(rules)), compiled(policy_of(rules, until="3ba")))
    assert {(change.start_step, change.end_step, change.direction) for change in changes} == {(3, 5, "loosens")}


def test_diff_sees_parameters_that_change_their_region() -> None:
    rules: list[dict[str, object]] = [{"class": "d", "region": "head", "weight": 1}]
    other = Regions(("tail", "head"), (("t", "h"), ("i",)), (("tail",), ("head",)), (), ("head", "tail"))
    changes = diff(compiled(policy_of(rules)), compiled(policy_of(rules), other))
    assert [(c.old_region, c.new_region, c.direction) for c in changes] == [("head", "tail", "tightens")]
    assert "head -> tail" in str(changes[0])


def test_diff_counts_new_classes_and_parameters_as_rejected_before() -> None:
    rules: list[dict[str, object]] = [{"class": "**", "weight": 1}]
    wider = Taxonomy("t", "2", (*TAXONOMY.meanings, ("e", "")))
    added = diff(compiled(policy_of(rules)), compiled(policy_of(rules), taxonomy=wider))
    assert {(c.class_path, c.direction) for c in added} == {("e", "loosens")}
    fewer = Regions(("tail", "head"), (("t",), ("h",)), (("tail",), ("head",)), (), ("head", "tail"))
    frozen = diff(compiled(policy_of(rules)), compiled(policy_of(rules), fewer))
    assert {(c.old_region, c.new_region, c.direction) for c in frozen} == {("head", None, "tightens")}


def test_diff_of_runs_of_different_lengths_is_refused() -> None:
    policy = policy_of(RULES)
    longer = compile_policy(policy, taxonomy=TAXONOMY, regions=REGIONS, num_steps=11)
    with pytest.raises(PolicyError, match="10 and 11 steps"):
        diff(compiled(policy), longer)


WEIGHTS = st.sampled_from([0.25, 0.5, 1.0])
POLICIES = st.builds(
    lambda weights, border: policy_of(
        [
            {"class": path, "region": region, "phase": phase, "weight": weight}
            for (path, region, phase), weight in zip(
                product(TAXONOMY.classes, ("head", "tail"), ("early", "late")), weights, strict=True
            )
        ],
        until=f"{border}ba",
    ),
    st.lists(WEIGHTS, min_size=12, max_size=12),
    st.integers(1, 9),
)


@pytest.mark.long
@given(POLICIES, POLICIES)
def test_diff_agrees_with_a_comparison_step_by_step(old: PolicyFile, new: PolicyFile) -> None:
    before, after = compiled(old), compiled(new)
    expected = {}
    for (c, path), step, (r, region) in product(
        enumerate(TAXONOMY.classes), range(NUM_STEPS), enumerate(REGIONS.names)
    ):
        pair = before.route(c, step)[r], after.route(c, step)[r]
        if pair[0] != pair[1]:
            expected[path, region, step] = pair
    found = {
        (change.class_path, change.new_region, step): (change.old_weight, change.new_weight)
        for change in diff(before, after)
        for step in range(change.start_step, change.end_step)
    }
    assert found == expected
    assert all((c.direction == "tightens") == (c.new_weight < c.old_weight) for c in diff(before, after))


def test_heat_map() -> None:
    rules: list[dict[str, object]] = [
        {"class": "a/**", "weight": 1},
        {"class": "a/b", "region": "tail", "weight": 0.5},
        {"class": "a/c", "region": "tail", "weight": 1.5},
        {"class": "a/c", "region": "head", "weight": 0.9},
        {"class": "d", "phase": "late", "weight": 0.1},
        {"class": "d", "phase": "late", "region": "tail", "weight": 0},
    ]
    policy = compiled(policy_of(rules, allow={"amplify": True}))
    assert heat_map_text(policy, "late") == dedent("""\
        phase late, steps 5 to 10
        class  decision  tail   head
        a/b    gate      ▒ 0.5  █ 1
        a/c    gate      ▲ 1.5  ▓ 0.9
        d      gate      ·      ░ 0.1""")
    assert "d      reject    ·      ·" in heat_map_text(policy, "early")
    with pytest.raises(PolicyError, match="no phase 'lat'; did you mean late"):
        heat_map_text(policy, "lat")
