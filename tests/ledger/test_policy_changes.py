"""What a later policy allows more, from the ledger's own tables: against the comparison of the policies themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.ledger.policy_changes import PolicyHistory, PolicyInForce
from cosmati.ledger.tables import Tables
from cosmati.records.ledger import NO_DETAILS, RunEntry
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.policy_analysis import diff
from cosmati.routing.policy_file import PolicyFile
from cosmati.routing.regions import Regions
from tests.routing.test_policy_analysis import NUM_STEPS, POLICIES, REGIONS, RULES, compiled, policy_of

from .ledgers import digest

BANDS = {"measure": "m", "names": ["low", "high"], "thresholds": [0.5]}


def tables_of(policy: CompiledPolicy, facts: object = None) -> Tables:
    """Return what a ledger's entry says of a policy."""
    details: dict[str, Any] = {"parameters": policy.partition.parameters, "policy_provenance": facts}
    return Tables(
        index=0,
        entry=RunEntry("r", (("policy", policy.policy_digest),), NO_DETAILS),
        details=details,
        classes=policy.classes,
        regions=policy.regions,
        routes=policy.routes,
        phases=tuple((phase.start_step, phase.end_step) for phase in policy.phases),
        policy=tuple(tuple(zip(*row, strict=True)) for row in zip(policy.weight, policy.decision, strict=True)),
        changes=(),
        bands=policy.bands,
        kinds=tuple((policy.band_names.index(kind.band), dict(kind.grades)) for kind in policy.kinds if kind.grades),
    )


def changed(*policies: tuple[int, CompiledPolicy]) -> PolicyInForce:
    history = PolicyHistory()
    for step, policy in policies:
        history.take(step, tables_of(policy))
    return history.seen[-1]


@given(POLICIES, POLICIES, st.integers(1, NUM_STEPS - 1))
def test_what_is_allowed_more_is_what_the_policies_say(old: PolicyFile, new: PolicyFile, step: int) -> None:
    before, after = compiled(old), compiled(new)
    loosened = {
        (one.class_path, one.new_region)
        for one in diff(before, after)
        if one.end_step > step and one.new_weight > one.old_weight
    }
    found = changed((0, before), (step, after))
    assert {tuple(line.partition(", from")[0].split(" in ")) for line in found.loosens} == loosened


def test_regions_of_other_names_and_bands_are_compared_too() -> None:
    old = compiled(policy_of(RULES))
    renamed = Regions(("low", "high"), REGIONS.parameters, (("low",), ("high",)), (), ("high", "low"))
    rules = [{**rule, "region": "low"} if "region" in rule else rule for rule in RULES]
    same = policy_of(rules, regions={"low": {"params": "t"}, "high": {"params": ["h", "i"]}})
    assert not changed((0, old), (3, compiled(same, renamed))).loosens
    banded = policy_of([*RULES, {"class": "a/c", "band": "low", "weight": 0.5}], bands=BANDS)
    assert not changed((0, old), (3, compiled(banded))).loosens
    back = changed((0, compiled(banded)), (3, old))
    assert any(line.startswith("a/c, band 0 in head") for line in back.loosens)
    assert any("band 2" in line for line in back.loosens), "bands above those that it had"


def test_a_resume_from_an_earlier_step_goes_on_from_what_was_in_force_there() -> None:
    signed, less = compiled(policy_of(RULES)), compiled(policy_of(RULES[1:]))
    assert changed((0, signed), (4, less), (6, signed)).loosens
    assert not changed((0, signed), (4, less), (2, signed)).loosens
    assert not changed((0, signed), (4, less), (4, signed)).loosens


def test_another_grace_is_told_though_no_weight_changes() -> None:
    signed = {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]}
    history = PolicyHistory()
    for step, own in ((0, {}), (3, {"grace": {"revocation": "reject"}})):
        policy = policy_of(RULES, **own)
        tables = tables_of(compiled(policy), None if step else signed)
        history.take(step, dataclasses.replace(tables, details={**tables.details, "policy_text": policy.to_mapping()}))
    (problem,) = history.seen[-1].problems("run")
    assert "grace: None -> {'expiry': 'stop', 'revocation': 'reject'" in problem
    assert "hasn't signed that" in problem


@pytest.mark.parametrize("facts", [5, {}, {"sources": []}, {"sources": [{"root": 1, "target": "x"}]}])
def test_claims_of_another_form_are_told(facts: object) -> None:
    old, new = tables_of(compiled(policy_of(RULES[1:])), facts), tables_of(compiled(policy_of(RULES)), facts)
    history = PolicyHistory()
    history.take(0, old)
    history.take(3, new)
    (problem, *_) = history.seen[-1].problems("run")
    assert "form that runs write" in problem or "meant" in problem
    assert history.seen[0].digest != digest("policy")
