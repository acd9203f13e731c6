"""Compiled policies: decisions, every refusal by name, routes and weights."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy import (
    Phase,
    compile_policy,
    resolve_time,
)
from cosmati.routing.policy_file import load_policy
from cosmati.routing.regions import Regions
from tests.routing.samples import MERGED, PARTITION, TAXONOMY, compiled, policy_of, refusal

# --- decisions


def test_decisions() -> None:
    policy = compiled(
        [
            {"class": "a/**", "weight": 1},
            {"class": "a/b/c", "region": "tail", "weight": 0},
            {"class": "a/b/d", "region": "tail", "weight": 0.25},
            {"class": "a/e", "phase": "early", "decision": "defer"},
        ]
    )
    assert policy.decision == (("admit", "admit"), ("gate", "gate"), ("defer", "admit"), ("reject", "reject"))
    assert policy.weight[0][0] == (0.0, 1.0)
    assert policy.weight[1][0] == (0.25, 1.0)
    assert policy.weight[2] == ((0.0, 0.0), (1.0, 1.0))
    assert policy.weight[3] == ((0.0, 0.0), (0.0, 0.0))


def test_nothing_said_is_rejected() -> None:
    policy = compiled([])
    assert {decision for row in policy.decision for decision in row} == {"reject"}
    assert policy.routes == ((0.0, 0.0),)


def test_amplification_is_admitted_where_allowed() -> None:
    rules: list[dict[str, object]] = [
        {"class": "f", "weight": 1.5},
        {"class": "a/e", "weight": 2, "region": "head"},
    ]
    policy = compiled(rules, allow={"amplify": True})
    assert policy.decision[3] == ("admit", "admit")
    assert policy.weight[3][0] == (1.5, 1.5)
    with pytest.raises(ValueError, match="rule 1 amplifies"):
        compiled(rules)


def test_without_phases_and_regions_there_is_one_of_each() -> None:
    policy = load_policy("{version: 1, taxonomy: t, rules: [{class: f, region: all, phase: main, weight: 1}]}")
    one = Regions(("all",), (("w",),), (("all",),))
    result = compile_policy(policy, taxonomy=TAXONOMY, regions=one, num_steps=3)
    assert result.phases == (Phase("main", 0, 3),)
    assert result.weight[3] == ((1.0,),)


# --- refusals


def test_incomparable_rules_are_refused_with_both_and_the_cell() -> None:
    text = refusal([{"class": "a/e", "weight": 1}, {"class": "**", "region": "head", "weight": 0.5}])
    assert "rule 1 (class a/e: weight 1) and rule 2 (class **, region head: weight 0.5) disagree" in text
    assert "(a/e, head, early) and 1 more cells" in text
    assert "Add a rule" in text


def test_equal_rules_that_differ_are_refused() -> None:
    assert "rule 1 (class f: weight 1) and rule 2 (class f: reject)" in refusal(
        [{"class": "f", "weight": 1}, {"class": "f", "decision": "reject"}]
    )


def test_incomparable_rules_that_agree_are_no_conflict() -> None:
    policy = compiled([{"class": "a/e", "weight": 1}, {"class": "**", "region": "head", "weight": 1}])
    assert policy.weight[2][0] == (1.0, 1.0)


def test_a_rule_for_the_cell_settles_a_conflict() -> None:
    rules: list[dict[str, object]] = [
        {"class": "a/e", "weight": 1},
        {"class": "**", "region": "head", "weight": 0.5},
        {"class": "a/e", "region": "head", "weight": 0.75},
    ]
    assert compiled(rules).weight[2][0] == (1.0, 0.75)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"class": "a/f", "weight": 1}, "rule 1: no class 'a/f' in taxonomy t; did you mean a/e"),
        ({"class": "a", "weight": 1}, r"rule 1: 'a' is a branch; write 'a/**'"),
        ({"class": "f/**", "weight": 1}, "rule 1: 'f' is a class, with none below it"),
        ({"class": "g/**", "weight": 1}, "rule 1: no class 'g/**'"),
        ({"class": "a/*", "weight": 1}, "rule 1: no class 'a/*'"),
        ({"class": "*", "weight": 1}, "rule 1: no class '*'"),
        ({"class": "f", "region": "haed", "weight": 1}, "rule 1: no region 'haed'; did you mean head?"),
        ({"class": "f", "phase": "lat", "weight": 1}, "rule 1: no phase 'lat'; did you mean late?"),
    ],
)
def test_unknown_names_are_refused_with_close_matches(rule: dict[str, object], message: str) -> None:
    assert message in refusal([rule])


def test_all_unknown_names_are_listed() -> None:
    text = refusal([{"class": ["x", "y"], "region": "z", "weight": 1}, {"class": "f", "phase": "w", "weight": 1}])
    assert text.count("\n  - ") == 4


def test_admitted_with_zero_everywhere_is_refused() -> None:
    text = refusal([{"class": "f", "weight": 0}])
    assert "f is admitted in phase early with weight 0 for every region" in text
    assert "use decision: reject" in text


def test_deferred_for_ever_is_refused() -> None:
    text = refusal([{"class": "f", "weight": 1}, {"class": "f", "phase": "late", "decision": "defer"}])
    assert "f is deferred in phase late, and no later phase admits it" in text


def test_deferred_in_part_is_refused() -> None:
    text = refusal(
        [
            {"class": "f", "phase": "late", "weight": 1},
            {"class": "f", "phase": "early", "decision": "defer"},
            {"class": "f", "phase": "early", "region": "head", "weight": 1},
        ]
    )
    assert "f is deferred in phase early, but rules for single regions say otherwise" in text


def test_other_taxonomy_is_refused() -> None:
    assert "the policy is for taxonomy 'u', and this is 't'" in refusal([], taxonomy="u")


def test_regions_of_other_selectors_are_refused() -> None:
    assert "the parameters were divided into all, but the policy declares head, tail" in refusal(
        [], Regions(("all",), (("w",),), (("all",),))
    )


def test_merged_regions_need_the_policy_to_allow_them() -> None:
    assert "region head&tail merges tied parameters" in refusal([], MERGED)


# --- phases and time


def test_phases_are_contiguous_and_resolved_to_steps() -> None:
    phases = [{"name": "one", "until": "0.25dur"}, {"name": "two", "until": "7ba"}, {"name": "three"}]
    policy = compiled([], phases=phases)
    assert policy.phases == (Phase("one", 0, 2), Phase("two", 2, 7), Phase("three", 7, 10))
    for step in range(10):
        (index,) = (i for i, phase in enumerate(policy.phases) if phase.start_step <= step < phase.end_step)
        assert policy.phase_at(step) == index


def test_a_given_clock_resolves_phases() -> None:
    policy = policy_of([], phases=[{"name": "one", "until": "2ep"}, {"name": "two"}])
    result = compile_policy(policy, taxonomy=TAXONOMY, regions=PARTITION, num_steps=10, resolve={"2ep": 8}.__getitem__)
    assert result.phases[1].start_step == 8


@pytest.mark.parametrize(
    ("untils", "message"),
    [
        (["0ba"], "phase p0 would go from step 0 to 0 of 10"),
        (["0.05dur"], "phase p0 would go from step 0 to 0 of 10"),
        (["5ba", "5ba"], "phase p1 would go from step 5 to 5 of 10"),
        (["5ba", "3ba"], "phase p1 would go from step 5 to 3 of 10"),
        (["10ba"], "phase p1 would go from step 10 to 10 of 10"),
        (["11ba"], "phase p0 would go from step 0 to 11 of 10"),
        (["2ep"], "the number of steps in an epoch isn't known"),
        (["soon"], "'soon' isn't a time"),
    ],
)
def test_bad_phases_are_refused(untils: list[str], message: str) -> None:
    phases: list[dict[str, str]] = [{"name": f"p{i}", "until": until} for i, until in enumerate(untils)]
    assert message in refusal([], phases=[*phases, {"name": f"p{len(untils)}"}])


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(PolicyError, match="at least one step"):
        compile_policy(policy_of([]), taxonomy=TAXONOMY, regions=PARTITION, num_steps=0)


@given(st.integers(0, 1000), st.integers(1, 10**6))
def test_fractions_of_the_run_are_exact(thousandths: int, num_steps: int) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}dur"
    assert resolve_time(text, num_steps=num_steps) == thousandths * num_steps // 1000


@pytest.mark.parametrize(("text", "step"), [("12ba", 12), ("0.1dur", 10), ("1dur", 100), ("3ep", 21), ("0.5ep", 3)])
def test_times(text: str, step: int) -> None:
    assert resolve_time(text, num_steps=100, steps_per_epoch=7) == step


@pytest.mark.parametrize("text", ["", "1", "ba", "-1ba", "1.5ba", "1e2ba", "1 ba", ".5dur", "1sec", "\u0661ba"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="isn't a time"):
        resolve_time(text, num_steps=100, steps_per_epoch=7)


# --- look-ups


def test_routes_are_a_table() -> None:
    rules: list[dict[str, object]] = [
        {"class": "a/**", "weight": 1},
        {"class": "a/e", "region": "tail", "phase": "late", "weight": 0.5},
        {"class": "f", "weight": 1, "phase": "late"},
    ]
    policy = compiled(rules)
    assert policy.policy_digest == policy_of(rules).digest
    assert policy.routes == ((0.0, 0.0), (0.5, 1.0), (1.0, 1.0))
    for class_id, step in product(range(4), range(10)):
        route = policy.route(class_id, step)
        assert route == policy.weight[class_id][0 if step < 5 else 1]
        assert policy.routes[policy.route_id(class_id, policy.phase_at(step))] == route
    assert policy.taxonomy_digest == TAXONOMY.digest


@pytest.mark.parametrize("class_id", [-1, 4])
def test_unknown_class_ids_have_no_route(class_id: int) -> None:
    policy = compiled([])
    with pytest.raises(PolicyError, match=f"no class {class_id}"):
        policy.route(class_id, 0)
    with pytest.raises(PolicyError, match=f"no class {class_id}"):
        policy.route_id(class_id, 0)


def test_steps_and_phases_outside_the_run_have_no_route() -> None:
    policy = compiled([])
    for step in (-1, 10):
        with pytest.raises(PolicyError, match=f"Step {step} isn't in the run"):
            policy.route(0, step)
    for phase in (-1, 2):
        with pytest.raises(PolicyError, match=f"no phase {phase}"):
            policy.route_id(0, phase)


def test_a_branch_covers_what_is_below_it_and_not_what_begins_like_it() -> None:
    taxonomy = Taxonomy("t", "1", tuple((path, "") for path in ("open/x", "openish/x", "open-like")))
    policy = policy_of([{"class": ["open/**"], "weight": 1.0}])
    found = compile_policy(policy, taxonomy=taxonomy, regions=PARTITION, num_steps=10)
    assert dict(zip(found.classes, found.decision, strict=True)) == {
        "open/x": ("admit", "admit"),
        "openish/x": ("reject", "reject"),
        "open-like": ("reject", "reject"),
    }
