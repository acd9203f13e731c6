"""What a later policy allows more, from the ledger's own tables: against the comparison of the policies themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.ledger.policy_changes import PolicyHistory, PolicyInForce, _others
from cosmati.ledger.tables import Tables
from cosmati.records.grace import REASONS, more_grace
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


@pytest.mark.long
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


GRADED = st.lists(
    st.fixed_dictionaries(
        {
            "class": st.sampled_from(["**", "a/c"]),
            "measure": st.just("m"),
            "grade": st.sampled_from(["low", "high"]),
            "factor": st.sampled_from([0.0, 0.5]),
        }
    ),
    max_size=2,
)


@pytest.mark.long
@given(GRADED, GRADED, st.sampled_from([["low", "high"], ["high", "low"], ["low", "high", "more"]]), st.booleans())
def test_grades_are_compared_by_their_names(
    old: list[dict[str, Any]], new: list[dict[str, Any]], grades: list[str], has_bands: bool
) -> None:
    bands = {"bands": BANDS} if has_bands else {}
    before = compiled(policy_of(RULES, measures={"m": {"grades": ["low", "high"]}}, attenuate=old))
    after = compiled(policy_of(RULES, measures={"m": {"grades": grades}}, attenuate=new, **bands))
    loosened = {
        (one.class_path, one.band_number, dict(one.grades)["m"] or "unmeasured", one.new_region)
        for one in diff(before, after)
        if one.end_step > 3 and one.new_weight > one.old_weight
    }
    found = set()
    for line in changed((0, before), (3, after)).loosens:
        kind, region = line.partition(", from")[0].split(" in ")
        name, *rest = kind.split(", ")
        band = next((int(one.split()[1]) for one in rest if one.startswith("band ")), None)
        found.add((name, band, next(one.split()[1] for one in rest if one.startswith("m ")), region))
    assert found == loosened


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


def test_four_things_that_are_allowed_more_are_told() -> None:
    was = PolicyInForce(0, digest("was"), {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]})
    now = PolicyInForce(3, digest("now"), None, was, ("one", "two", "three", "four", "five"))
    assert now.problems("r") == [
        "from step 3 on more is allowed than was signed (one; two; three; four), and abababababab hasn't signed that"
    ]


def test_another_grace_is_told_though_no_weight_changes() -> None:
    signed = {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]}
    history = PolicyHistory()
    for step, own in ((0, {}), (3, {"grace": {"revocation": "reject"}})):
        policy = policy_of(RULES, **own)
        tables = tables_of(compiled(policy), None if step else signed)
        history.take(step, dataclasses.replace(tables, details={**tables.details, "policy_text": policy.to_mapping()}))
    (problem,) = history.seen[-1].problems("run")
    assert "grace for revocation: stop -> reject" in problem
    assert "hasn't signed that" in problem


def saying(phases: tuple[tuple[int, int], ...], **text: Any) -> Tables:
    """Return tables whose policy's own text says so, and has no more than these phases."""
    tables = tables_of(compiled(policy_of(RULES)))
    return dataclasses.replace(tables, phases=phases, details={**tables.details, "policy_text": text})


@pytest.mark.parametrize("phases", [((0, 2), (2, 10)), ((2, 10), (0, 2)), ((0, 10),)])
@pytest.mark.parametrize(("part", "steps"), [("0.6dur", 6), ("0.55dur", 5), ("0.5dur", 5), ("0.4dur", 4)])
def test_a_part_of_the_run_is_of_all_its_phases(phases: tuple[tuple[int, int], ...], part: str, steps: int) -> None:
    old, new = (saying(phases, grace={"expiry": {"finish": span}}) for span in ("5ba", part))
    longer = [f"grace for expiry: {{'finish': '5ba'}} -> {{'finish': '{part}'}}"]
    assert _others(old, new) == (longer if steps > 5 else [])
    assert _others(saying(((0, 99),)), saying(phases)) == []


def test_without_phases_a_part_of_the_run_is_no_step() -> None:
    old, new = saying(()), saying((), grace={"expiry": {"finish": "1dur"}, "licence": {"finish": "1ba"}})
    assert _others(old, new) == ["grace for licence: stop -> {'finish': '1ba'}"]


def test_all_that_no_weight_tells_is_told_in_its_order() -> None:
    span = ((0, 10),)
    old = saying(span, starvation="stop", bands=[1], measures={"m": 1}, grace={"expiry": "stop"})
    new = saying(span, starvation="go on", bands=[2], measures={"m": 2}, grace={"expiry": "reject"})
    assert _others(old, new) == [
        "starvation: stop -> starvation: go on",
        "bands: [1] -> [2]",
        "measures: {'m': 1} -> {'m': 2}",
        "grace for expiry: stop -> reject",
    ]
    assert _others(new, new) == []
    # What bands there are is compared by their weights.
    assert _others(saying(span, bands=[1]), saying(span, measures={"m": 1})) == []
    silent = dataclasses.replace(new, details={"policy_text": "a text"})
    assert _others(silent, silent) == []
    assert _others(silent, new)[0] == "starvation: None -> starvation: go on"


@pytest.mark.parametrize(
    "grace", [{"expiry": {"finish": "soon"}}, {"expiry": {"finish": "1/0dur"}}, "for ever", ["reject"]]
)
def test_a_grace_that_says_nothing_is_told_as_it_stands(grace: object) -> None:
    signed = {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]}
    history = PolicyHistory()
    for step, own in ((0, {}), (3, {"grace": grace})):
        policy = policy_of(RULES)
        tables = tables_of(compiled(policy), None if step else signed)
        text = policy.to_mapping() | own
        history.take(step, dataclasses.replace(tables, details={**tables.details, "policy_text": text}))
    (problem,) = history.seen[-1].problems("run")
    assert f"grace: None -> {grace}" in problem


@pytest.mark.parametrize("name", ["bands", "measures"])
def test_which_rows_a_word_means_is_the_authoritys_too(name: str) -> None:
    signed = {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]}
    kinds: dict[str, Any] = {"bands": BANDS, "measures": {"m": {"grades": ["low", "high"], "thresholds": [0.5]}}}
    other = {
        "bands": {**BANDS, "thresholds": [0.4]},
        "measures": {"m": {"grades": ["low", "high"], "thresholds": [0.4]}},
    }
    history = PolicyHistory()
    for step, own in ((0, kinds), (3, {**kinds, name: other[name]})):
        policy = policy_of(RULES, **own)
        tables = tables_of(compiled(policy), None if step else signed)
        history.take(step, dataclasses.replace(tables, details={**tables.details, "policy_text": policy.to_mapping()}))
    (problem,) = history.seen[-1].problems("run")
    assert f"{name}: " in problem
    assert "0.4" in problem


def test_less_grace_is_the_operators() -> None:
    signed = {"sources": [{"root": "ab" * 32, "target": "policy/main/1"}]}
    history = PolicyHistory()
    for step, own in ((0, {"grace": {"expiry": {"finish": "4ba"}, "licence": "reject"}}), (3, {})):
        policy = policy_of(RULES, **own)
        tables = tables_of(compiled(policy), None if step else signed)
        history.take(step, dataclasses.replace(tables, details={**tables.details, "policy_text": policy.to_mapping()}))
    assert len(history.seen) == 2
    assert history.seen[-1].problems("run") == []


SPANS = st.one_of(
    st.sampled_from(["stop", "reject"]),
    st.fixed_dictionaries({"finish": st.sampled_from(["0ba", "1ba", "7ba", "0.5dur", "0.75dur", "1dur", "0dur"])}),
)
ANSWERS = st.fixed_dictionaries({}, optional={"expiry": SPANS, "revocation": SPANS, "licence": SPANS})


def learns(answer: object) -> tuple[int, int]:
    """Return of a run of 10 steps that loses one of two classes: steps with that class, and with any."""
    steps = {"0ba": 0, "1ba": 1, "7ba": 7, "0.5dur": 5, "0.75dur": 7, "1dur": 10, "0dur": 0}
    if isinstance(answer, dict):
        return steps[answer["finish"]], 0
    return 0, 10 * (answer == "reject")


@given(st.none() | ANSWERS, st.none() | ANSWERS)
def test_more_grace_is_more_steps(was: dict[str, object] | None, now: dict[str, object] | None) -> None:
    told = {line.split()[2].rstrip(":") for line in more_grace(was, now, 10)}
    pairs = {name: [learns((one or {}).get(name, "stop")) for one in (was, now)] for name in REASONS}
    assert told == {name for name, (before, after) in pairs.items() if after > before}


@pytest.mark.parametrize("facts", [5, {}, {"sources": []}, {"sources": [{"root": 1, "target": "x"}]}])
def test_claims_of_another_form_are_told(facts: object) -> None:
    old, new = tables_of(compiled(policy_of(RULES[1:])), facts), tables_of(compiled(policy_of(RULES)), facts)
    history = PolicyHistory()
    history.take(0, old)
    history.take(3, new)
    (problem, *_) = history.seen[-1].problems("run")
    assert "form that runs write" in problem or "meant" in problem
    assert history.seen[0].digest != digest("policy")
