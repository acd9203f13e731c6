"""Which policy took the place of which, what it allows more in words, and who had to sign that: by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from cosmati.ledger.policy_changes import PolicyHistory, PolicyInForce, _kinds, _shared_regions, _weights
from cosmati.ledger.tables import Tables
from cosmati.records.ledger import NO_DETAILS, RunEntry

from .ledgers import digest

ROOT, RUN = "ab" * 32, "the run's key"


def says(
    weights: Mapping[str, Any],
    *,
    regions: tuple[str, ...] = ("low", "high"),
    phases: tuple[tuple[int, int], ...] = ((0, 10),),
    bands: tuple[str, ...] = ("",),
    kinds: tuple[tuple[int, Mapping[str, str]], ...] = (),
    **details: Any,
) -> Tables:
    """Return tables that give each class, by kind and phase, the same weight in all regions or one for each."""
    rows = []
    for own in weights.values():
        for kind in own if len(bands) > 1 else [own]:
            by_phase = kind if len(phases) > 1 else [kind]
            each = [one if isinstance(one, tuple) else (float(one),) * len(regions) for one in by_phase]
            rows.append(tuple((one, "admit") for one in each))
    entry = RunEntry("r", (("policy", digest(repr((weights, regions, phases, bands, details)))),), NO_DETAILS)
    return Tables(0, entry, details, (*weights,), regions, (), phases, tuple(rows), (), (), bands, kinds)


def after(*policies: tuple[int, Tables]) -> PolicyInForce:
    history = PolicyHistory()
    for step, tables in policies:
        history.take(step, tables)
    return history.seen[-1]


def told(old: Tables, new: Tables, step: int = 3) -> list[str]:
    return list(after((0, old), (step, new)).loosens)


# ------------------------------------------------------------------------------------------------------- what is more


def test_each_region_in_which_a_class_weighs_more_is_told_with_both_weights() -> None:
    old, new = says({"a": (0.25, 1.0), "b": 1.0}), says({"a": (1 / 3, 1.0), "b": (0.5, 1.5), "c": (0.0, 2.0)})
    assert told(old, new) == [
        "a in low, from step 3 on: 0.25 -> 0.333333",
        "b in high, from step 3 on: 1 -> 1.5",
        "c in high, from step 3 on: 0 -> 2",
    ]
    assert told(new, old) == ["b in low, from step 3 on: 0.5 -> 1"]


def test_a_phase_counts_from_its_first_step_and_only_those_that_are_still_to_come() -> None:
    old = says({"a": (1.0, 1.0)}, phases=((0, 10),))
    new = says({"a": [9, 1, 4]}, phases=((0, 2), (2, 5), (5, 10)))
    assert told(old, new, 2) == [f"a in {region}, from step 5 on: 1 -> 4" for region in ("low", "high")]
    assert told(old, new, 1) == [
        f"a in {region}, from step {more} on: 1 -> {weight}"
        for more, weight in ((1, 9), (5, 4))
        for region in ("low", "high")
    ]
    assert told(new, old, 2) == []
    # Nothing is allowed any more from step 5 on where the phases end there.
    short = says({"a": [1, 1]}, phases=((0, 2), (2, 5)))
    assert told(short, old, 4) == []
    assert told(says({"a": 1}, phases=((0, 4),)), old, 4) == [
        f"a in {region}, from step 4 on: 0 -> 1" for region in ("low", "high")
    ]


def test_a_class_that_is_gone_and_a_weight_that_stays_are_nothing_more() -> None:
    old = says({"a": 1, "b": 1})
    assert told(old, says({"a": 1})) == []
    assert told(old, dataclasses.replace(old, classes=("b", "a"))) == []


def test_bands_are_named_where_a_side_has_some() -> None:
    plain, banded = says({"a": 1}, regions=("r",)), says({"a": [0.5, 2]}, regions=("r",), bands=("x", "y"))
    assert told(plain, banded) == ["a, band 1 in r, from step 3 on: 1 -> 2"]
    assert told(banded, plain) == [
        "a, band 0 in r, from step 3 on: 0.5 -> 1",
        "a, band 2 in r, from step 3 on: 0 -> 1",
    ]
    more = says({"a": [0.5, 2, 1]}, regions=("r",), bands=("x", "y", "z"))
    assert told(banded, more) == ["a, band 2 in r, from step 3 on: 0 -> 1"]
    assert told(banded, says({"a": [1, 2]}, regions=("r",), bands=("y", "x"))) == [
        "a, band 0 in r, from step 3 on: 0.5 -> 1"
    ]


def test_grades_are_named_by_their_measure_and_bands_only_where_there_are_several() -> None:
    kinds: tuple[tuple[int, Mapping[str, str]], ...] = ((0, {"m": ""}), (0, {"m": "good"}))
    old, new = (says({"a": own}, regions=("r",), bands=("", "m good"), kinds=kinds) for own in ([1, 1], [2, 1.5]))
    assert told(old, new) == [
        "a, m unmeasured in r, from step 3 on: 1 -> 2",
        "a, m good in r, from step 3 on: 1 -> 1.5",
    ]
    # A measure that only one side knows tells nothing apart on the other.
    assert told(says({"a": 1.5}, regions=("r",)), new) == ["a, m unmeasured in r, from step 3 on: 1.5 -> 2"]


def test_the_kinds_of_rows_are_those_of_both_sides_bands_first() -> None:
    one = says({}, bands=("p", "q"), kinds=((0, {"n": "x"}), (0, {"m": "b"})))
    two = says({}, bands=("p", "q"), kinds=((1, {"m": "a"}), (0, {"m": ""})))
    grades = [{"m": m, "n": n} for m in ("", "b", "a") for n in ("", "x")]
    assert list(_kinds(one, two)) == [(band, own) for band in (0, 1, 2) for own in grades]
    assert list(_kinds(two, two)) == [(band, {"m": grade}) for band in (0, 1) for grade in ("", "a")]
    assert list(_kinds(says({}), says({}))) == [(0, {})]


def test_a_weight_is_that_of_the_phase_the_class_and_the_first_kind_that_fits() -> None:
    tables = says(
        {"a": [[(1.0,), (2.0,)], [(3.0,), (4.0,)]], "b": [[(5.0,), (6.0,)], [(7.0,), (8.0,)]]},
        regions=("r",),
        phases=((1, 3), (3, 5)),
        bands=("x", "y"),
    )
    found = [
        [_weights(tables, name, band, {}, step).get("r") for step in range(6)] for name in "ab" for band in range(3)
    ]
    of = [(1, 2), (3, 4), None, (5, 6), (7, 8), None]
    assert found == [[None, p[0], p[0], p[1], p[1], None] if p else [None] * 6 for p in of]
    assert _weights(tables, "c", 0, {}, 2) == {}
    kinds: tuple[tuple[int, Mapping[str, str]], ...] = ((0, {"m": "g", "n": "h"}), (0, {"m": "g", "n": ""}))
    graded = says({"a": [1, 2]}, regions=("r",), bands=("x", "y"), kinds=kinds)
    assert [
        _weights(graded, "a", band, {"m": m, "n": n}, 0).get("r")
        for band, m, n in ((0, "g", "h"), (0, "g", ""), (1, "g", "h"), (0, "", "h"), (0, "g", "x"))
    ] == [1.0, 2.0, 1.0, None, None]


def test_regions_that_share_a_parameter_are_compared_and_others_by_their_names() -> None:
    old = says({"a": (1.0, 2.0)}, parameters=[["p", "q"], ["r"]])
    new = says({"a": (2.0, 2.0)}, regions=("one", "two"), parameters=[["q", "r"], ["p", "s", "t"]])
    assert _shared_regions(old, new) == [("low", "one"), ("high", "one"), ("low", "two"), ("", "two")]
    assert _shared_regions(old, says({})) == [("low", "low"), ("high", "high")]
    assert _shared_regions(says({}), old) == [("", "low"), ("", "high")]
    assert told(old, new) == [
        "a in one, from step 3 on: 1 -> 2",
        "a in two, from step 3 on: 1 -> 2",
        "a in two, from step 3 on: 0 -> 2",
    ]


# ------------------------------------------------------------------------------------------------ what follows on what


def test_who_vouches_is_part_of_a_policy_and_what_repeats_is_not_seen_twice() -> None:
    history, less = PolicyHistory(), says({"a": 1})
    signed = dataclasses.replace(less, details={"policy_provenance": {"sources": []}})
    for step, tables in ((0, less), (2, less), (4, signed), (6, signed), (8, less)):
        history.take(step, tables)
    assert [(one.step, one.facts) for one in history.seen] == [(0, None), (4, {"sources": []}), (8, None)]
    assert [one.digest for one in history.seen] == [dict(less.entry.commitments)["policy"]] * 3
    first, second, _ = history.seen
    assert first.is_other(second)
    assert first.is_other(dataclasses.replace(first, digest=b""))
    assert not first.is_other(dataclasses.replace(second, facts=None, step=99))


def test_without_a_policy_nothing_is_noted() -> None:
    history = PolicyHistory()
    history.take(0, says({}))
    assert history.seen == []
    history.take(2, dataclasses.replace(says({"a": 1}), entry=RunEntry("r", (), NO_DETAILS)))
    (one,) = history.seen
    assert (one.step, one.digest, one.before, one.loosens, one.readmits) == (2, b"", None, (), False)


def test_to_drop_a_policy_allows_more_than_it_did_and_needs_those_who_signed_it() -> None:
    denied, nothing = says({"a": 0}), says({})
    signed = dataclasses.replace(denied, details={"policy_provenance": facts(3)})
    one = after((0, signed), (3, nothing))
    assert (one.step, one.digest, one.readmits) == (3, dict(nothing.entry.commitments)["policy"], True)
    assert one.loosens == ("no policy takes its place, so nothing is kept from any rows",)
    assert one.problems(RUN) == [
        f"from step 3 on more is allowed than was signed ({one.loosens[0]}), and {ROOT[:12]} hasn't signed that"
    ]
    again = after((0, signed), (3, nothing), (5, nothing), (7, signed))
    assert again.before is not None
    assert (again.step, again.before.loosens, again.loosens, again.readmits) == (7, (), (), False)


def test_a_policy_knows_the_one_before_and_whether_it_admits_what_was_denied() -> None:
    half, whole = says({"a": (0.5, 0.0)}), says({"a": (1.0, 0.0)})
    one = after((0, half), (3, whole))
    assert one.before is not None
    assert (one.before.step, one.before.before, one.loosens) == (0, None, ("a in low, from step 3 on: 0.5 -> 1",))
    assert not one.readmits
    # Of several that are more, one that was denied is enough.
    assert after((0, half), (3, says({"a": (1.0, 0.5)}))).readmits
    again = after((0, half), (3, whole), (5, half), (4, whole))
    assert again.before is not None
    assert (again.step, again.before.step) == (4, 3)
    assert again.loosens == ()


def test_the_last_that_was_signed_is_found_over_those_that_were_not() -> None:
    chain: PolicyInForce | None = None
    signed: list[Mapping[str, Any] | None] = []
    for step, facts in enumerate((None, {"n": 1}, None, None, {"n": 2}, None)):
        chain = PolicyInForce(step, b"", facts, chain)
        signed.append(chain.signed_before)
    assert signed == [None, None, {"n": 1}, {"n": 1}, {"n": 1}, {"n": 2}]


# ----------------------------------------------------------------------------------------------------- who signed that


def facts(number: int, *, root: str = ROOT, keys: int = 1, **statement: object) -> dict[str, Any]:
    source = {"root": root, "target": f"policy/main/{number}", "keyids": [f"k{n}" for n in range(keys)]}
    return {"sources": [source], "statement": statement}


WAS = PolicyInForce(0, digest("was"), facts(3))
GOOD: dict[str, Any] = {"run": RUN, "previous": digest("was").hex(), "from_step": 5}
MORE = "from step 5 on more is allowed than was signed (more)"


def problems(now: Mapping[str, Any] | None, *, readmits: bool = False, before: PolicyInForce | None = WAS) -> list[str]:
    return PolicyInForce(5, digest("now"), now, before, ("more",), readmits).problems(RUN)


@pytest.mark.parametrize("begin", [0, 4, 5])
def test_what_the_same_authority_signed_next_for_a_step_that_has_come_holds(begin: int) -> None:
    assert problems(facts(4, **GOOD | {"from_step": begin})) == []


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, f"{MORE}, and {ROOT[:12]} hasn't signed that"),
        (facts(4, root="cd" * 32, **GOOD), f"{MORE}, and {ROOT[:12]} hasn't signed that"),
        (facts(4, **GOOD | {"run": "x"}), f"{MORE}, and its signers meant the run x, where that is {RUN}"),
        (
            facts(4, run=RUN, from_step=5),
            f"{MORE}, and its signers meant the previous (none), where that is {digest('was').hex()}",
        ),
        (facts(4, **GOOD | {"from_step": 6}), f"{MORE}, and its signers meant step 6"),
        (facts(4, **GOOD | {"from_step": "5"}), f"{MORE}, and its signers meant step 5"),
        (facts(4, **GOOD | {"from_step": None}), f"{MORE}, and its signers meant step None"),
        (facts(3, **GOOD), f"{MORE}, and policy/main/3 isn't the version after policy/main/3"),
        (facts(5, **GOOD), f"{MORE}, and policy/main/5 isn't the version after policy/main/3"),
    ],
)
def test_each_thing_that_its_signers_did_not_mean_is_told(now: Mapping[str, Any] | None, said: str) -> None:
    assert problems(now) == [said]


def test_all_that_is_wrong_is_told_and_denied_things_take_two_signers() -> None:
    found = problems(facts(9, run="x", previous="y", from_step=9), readmits=True)
    assert [one.removeprefix(f"{MORE}, ")[:22] for one in found] == [
        "and its signers meant ",
        "and its signers meant ",
        "and its signers meant ",
        "and policy/main/9 isn'",
        "some of which was deni",
    ]
    one_signer = [f"{MORE}, some of which was denied: that takes two signers, and one has signed"]
    assert [problems(facts(4, keys=keys, **GOOD), readmits=True) for keys in (1, 2, 3)] == [one_signer, [], []]
    unless_told = PolicyInForce(5, digest("now"), facts(4, **GOOD), WAS, ("more",))
    assert unless_told.problems(RUN) == []
    assert not hasattr(unless_told, "__dict__")


def test_what_was_declared_or_allows_no_more_needs_nobody() -> None:
    assert problems(None, before=dataclasses.replace(WAS, facts=None)) == []
    assert problems(None, before=None) == []
    assert PolicyInForce(5, digest("now"), None, WAS).problems(RUN) == []
    # A policy that was declared in between hides nothing that was signed before it.
    between = PolicyInForce(2, digest("between"), None, WAS)
    assert problems(None, before=between) == [f"{MORE}, and {ROOT[:12]} hasn't signed that"]
    assert problems(facts(4, **GOOD | {"previous": digest("between").hex()}), before=between) == []
    assert len(problems(facts(4, **GOOD), before=between)) == 1


def test_a_target_that_has_no_number_is_told_as_a_form_that_no_run_writes() -> None:
    now = facts(4, **GOOD)
    now["sources"][0]["target"] = "policy/main/next"
    (problem,) = problems(now)
    assert problem.startswith("what the ledger says of signatures isn't of the form that runs write: ValueError")
