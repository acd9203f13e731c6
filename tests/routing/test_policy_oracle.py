"""Every cell of a compiled policy against an oracle.

Each rule is spelt out as single patterns, and those that cover a cell are compared in pairs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.errors import PolicyError
from cosmati.routing.policy import check_rules
from tests.routing.samples import CLASSES, MERGED, PHASES, REGIONS, TAXONOMY, compiled, policy_of, refusal

pytestmark = pytest.mark.long

PATTERN_RANK = {"**": 0, "a/**": 1, "a/b/**": 2}
COVERS = {
    "**": set(CLASSES),
    "a/**": {"a/b/c", "a/b/d", "a/e"},
    "a/b/**": {"a/b/c", "a/b/d"},
    **{path: {path} for path in CLASSES},
}


def oracle(rules: list[dict[str, object]], cell: tuple[str, str, str]) -> set[object]:
    """Return what the rules that no rule beats say about a cell."""
    candidates = []
    for rule in rules:
        axes: list[Any] = [rule["class"], rule.get("region", ["*"]), rule.get("phase", ["*"])]
        for pattern, region, phase in product(*axes):
            if cell[0] in COVERS[pattern] and region in {cell[1], "*"} and phase in {cell[2], "*"}:
                ranks = (PATTERN_RANK.get(pattern, 9), int(region != "*"), int(phase != "*"))
                candidates.append((ranks, rule.get("decision", rule.get("weight"))))
    return {said for mine, said in candidates if not any(_beats(theirs, mine) for theirs, _ in candidates)}


def _beats(theirs: tuple[int, ...], mine: tuple[int, ...]) -> bool:
    return theirs != mine and all(t >= m for t, m in zip(theirs, mine, strict=True))


def oracle_decision(said: list[object]) -> str | None:
    """Return the decision that a class's cells in a phase come to; None where that's to be refused."""
    weights = [entry for entry in said if isinstance(entry, float)]
    if "defer" in said:
        return "defer" if set(said) == {"defer"} else None
    if not any(weights):
        return None if weights else "reject"
    return "gate" if any(0 < weight < 1 for weight in weights) else "admit"


def oracle_table(rules: list[dict[str, object]]) -> dict[str, list[str | None]] | None:
    """Return the decisions by class, or None where the policy is to be refused."""
    table: dict[str, list[str | None]] = {}
    for path in CLASSES:
        decisions = []
        for phase in PHASES:
            cells = [oracle(rules, (path, region, phase)) or {"reject"} for region in REGIONS]
            if any(len(cell) > 1 for cell in cells):
                return None
            decisions.append(oracle_decision([next(iter(cell)) for cell in cells]))
        if (
            None in decisions
            or (decisions[0] == "defer" and decisions[1] not in {"admit", "gate"})
            or decisions[1] == "defer"
        ):
            return None
        table[path] = decisions
    return table


def some(names: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=1, max_size=2)


WEIGHT_RULES = st.fixed_dictionaries(
    {"class": some(tuple(COVERS)), "weight": st.sampled_from([0.0, 0.5, 1.0])},
    optional={"region": some((*REGIONS, "*")), "phase": some((*PHASES, "*"))},
)
DECISION_RULES = st.fixed_dictionaries(
    {"class": some(tuple(COVERS)), "decision": st.sampled_from(["reject", "defer"])},
    optional={"phase": some(PHASES)},
)
RULES = st.lists(st.one_of(WEIGHT_RULES, WEIGHT_RULES, DECISION_RULES), max_size=6)


@given(RULES)
def test_every_cell_agrees_with_the_oracle(rules: list[dict[str, object]]) -> None:
    expected = oracle_table(rules)
    if expected is None:
        refusal(rules)
        return
    policy = compiled(rules)
    assert policy.classes == CLASSES
    for c, p in product(range(4), range(2)):
        assert policy.decision[c][p] == expected[CLASSES[c]][p]
        for r, region in enumerate(policy.regions):
            said = oracle(rules, (CLASSES[c], region, PHASES[p]))
            weights = [entry for entry in said if isinstance(entry, float)]
            assert policy.weight[c][p][r] == (weights[0] if weights else 0.0)


@given(RULES)
def test_without_a_model_the_same_policies_are_refused(rules: list[dict[str, object]]) -> None:
    policy = policy_of(rules)
    if oracle_table(rules) is None:
        with pytest.raises(PolicyError):
            check_rules(policy, taxonomy=TAXONOMY)
    else:
        check_rules(policy, taxonomy=TAXONOMY)


@given(RULES, st.randoms())
def test_order_of_rules_means_nothing(rules: list[dict[str, object]], random: object) -> None:
    shuffled = list(rules)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    if oracle_table(rules) is None:
        refusal(shuffled)
    else:
        assert compiled(shuffled) == compiled(rules)


@given(RULES)
def test_merged_regions_take_the_minimum(rules: list[dict[str, object]]) -> None:
    if oracle_table(rules) is None:
        return
    apart = compiled(rules)
    try:
        policy = compiled(rules, MERGED, allow={"tied": True})
    except PolicyError as error:
        assert "weight 0 for every region" in str(error)  # noqa: PT017
        assert any(any(route) and not min(route) for phases in apart.weight for route in phases)
        return
    assert policy.weight == tuple(tuple((min(route),) for route in phases) for phases in apart.weight)
