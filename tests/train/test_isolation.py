"""Which regions are denied to which classes, and what speaks against the isolation of what is a class's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.isolated import Isolated
from cosmati.core.plan import Facts, Guarantee, Plan, Promise
from cosmati.errors import PlanError
from cosmati.routing.measures import RowKind
from cosmati.routing.policy import CompiledPolicy, Phase
from cosmati.routing.regions import Regions
from cosmati.train.isolation import denied_pairs, isolated_pairs, without_admitted

CLASSES = ("free", "mine", "late")
PARAMETERS = (("base.weight",), ("own.weight",), ("theirs.weight",))
REGIONS = ("base", "own", "theirs")
PHASES = (Phase("first", 0, 10), Phase("second", 10, 20))
OPEN = (1.0, 0.0, 0.0)
"""The weights of a class that teaches the base alone."""
MINE = (0.0, 1.0, 0.0)


def policy(weight: Any, decision: Any = None, *, parameters: Any = PARAMETERS, **changed: Any) -> CompiledPolicy:
    """Rows of `weight` and `decision` are classes, or their kinds; columns are phases."""
    decisions = decision or tuple(("admit",) * len(row) for row in weight)
    names = tuple(REGIONS[: len(parameters)])
    partition = Regions(names, parameters, tuple((name,) for name in names))
    given: dict[str, Any] = {"classes": CLASSES, "phases": PHASES, "weight": weight, "decision": decisions}
    return CompiledPolicy(partition=partition, policy_digest=b"P" * 32, taxonomy_digest=b"T" * 32, **(given | changed))


def twice(*rows: tuple[float, ...]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """The same weights in both phases."""
    return tuple((row, row) for row in rows)


class Own(Isolated):
    def __init__(self, class_name: str) -> None:
        super().__init__(class_name)
        self.weight = nn.Parameter(torch.ones(2))


def model(own: str = "mine", theirs: str = "free") -> nn.Module:
    made = nn.Module()
    made.base, made.own, made.theirs = nn.Linear(1, 2, bias=False), Own(own), Own(theirs)
    return made


# ------------------------------------------------------------------------------------------------------------- denied


def test_without_a_policy_nothing_is_denied() -> None:
    assert denied_pairs(None, [0, 1]) == ()


def test_a_region_is_denied_to_a_class_that_never_teaches_it_where_it_is_admitted() -> None:
    given = policy(
        (((1.0, 0.0, 0.0), (1.0, 0.5, 0.0)), ((0.0, 0.0, 0.0), (1.0, 0.0, 1.0)), ((0.0, 0.0, 0.0), (0.0, 1.0, 1.0))),
        (("admit", "admit"), ("defer", "gate"), ("reject", "defer")),
    )
    # Of the third class nothing is promised: it's admitted nowhere.
    assert denied_pairs(given, [2, 1, 0, 1]) == (("free", "theirs"), ("mine", "own"))
    assert denied_pairs(given, [1]) == (("mine", "own"),)
    assert denied_pairs(given, []) == ()


@pytest.mark.parametrize("cells", list(product([0.0, 0.5], repeat=4)))
def test_all_kinds_of_a_classs_rows_count_in_all_phases(cells: tuple[float, ...]) -> None:
    kinds = RowKind("low"), RowKind("high")
    rows = (((1.0, cells[0]), (1.0, cells[1])), ((1.0, cells[2]), (1.0, cells[3])))
    given = policy(rows, classes=("one",), kinds=kinds, parameters=PARAMETERS[:2])
    assert denied_pairs(given, [0, 0]) == (() if any(cells) else (("one", "own"),))
    # What a cell says that isn't admitted is nobody's.
    left_out = dataclasses.replace(given, decision=(("admit", "admit"), ("admit", "reject")))
    assert denied_pairs(left_out, [0]) == (() if any(cells[:3]) else (("one", "own"),))


# ----------------------------------------------------------------------------------------------------------- isolated

MEND = "give what is mine's own a region of its own (tag: isolated/mine)"


def never() -> tuple[str, ...]:
    raise AssertionError("nothing is isolated")


def test_without_a_policy_each_class_that_has_something_of_its_own_rests() -> None:
    found = isolated_pairs(model(), None, [0], never)
    assert found.keys() == {("free", "all"), ("mine", "all")}
    for reasons in found.values():
        (why,) = reasons
        assert why.startswith("without a policy nobody says whose rows these are")
    assert isolated_pairs(nn.Linear(1, 1), None, [0], never) == {}


def test_a_model_with_nothing_of_a_classs_own_is_asked_nothing_more() -> None:
    plain = nn.Module()
    plain.base, plain.own, plain.theirs = (nn.Linear(1, 2, bias=False) for _ in range(3))
    assert isolated_pairs(plain, policy(twice(OPEN, OPEN, OPEN)), [0, 1], never) == {}


def test_what_is_only_a_classs_own_and_taught_by_it_alone_is_isolated() -> None:
    given = policy(twice((1.0, 0.0, 1.0), MINE, OPEN))
    assert isolated_pairs(model(), given, [1, 2], tuple) == {("mine", "own"): ()}
    # A class that isn't in the data has no pair, and teaches nothing.
    assert isolated_pairs(model(), given, [2], never) == {}
    assert isolated_pairs(model(), given, [1, 1], lambda: ("a", "b")) == {("mine", "own"): ("a", "b")}


def test_reasons_are_told_in_order_and_what_breaks_all_comes_last() -> None:
    # The region `own` holds a weight that everybody reads, others teach it, and its class teaches the base, too.
    shared = (("base.weight",), ("own.weight", "base.bias"), ("theirs.weight",))
    made = model()
    made.base = nn.Linear(1, 2)
    given = policy(twice((1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.5, 0.0)), parameters=shared)
    found = isolated_pairs(made, given, [1, 2, 0], lambda: ("more",))
    assert found[("mine", "own")] == (
        f"rows of other classes read base.bias of 'own', too: {MEND}",
        "free, late may teach 'own', too: give them weight 0 there",
        "mine may teach base, too: give it weight 0 there",
        "more",
    )
    assert found[("free", "theirs")] == ("free may teach base, own, too: give it weight 0 there", "more")
    assert list(found) == [("free", "theirs"), ("mine", "own")]


@pytest.mark.parametrize(("weights", "said"), [((0.0, 0.0, 0.0), 0), ((0.0, 1.0, 0.0), 1)])
def test_teaching_in_one_phase_is_enough(weights: tuple[float, ...], said: int) -> None:
    late = policy((((0.0, 0.0, 0.0), weights), (MINE, MINE), (OPEN, OPEN)))
    assert len(isolated_pairs(model(), late, [0, 1], tuple)[("mine", "own")]) == said
    assert len(isolated_pairs(model(), late, [1, 2], tuple)[("mine", "own")]) == 0, "not of the data"


def test_what_a_class_teaches_of_others_own_is_told_and_what_is_all_its_own_is_not() -> None:
    both = model("mine", "mine")
    given = policy(twice(OPEN, (0.0, 1.0, 1.0), OPEN))
    assert isolated_pairs(both, given, [0, 1], tuple) == {("mine", "own"): (), ("mine", "theirs"): ()}
    told = isolated_pairs(model("mine", "late"), given, [0, 1], tuple)
    assert told == {("mine", "own"): ("mine may teach theirs, too: give it weight 0 there",)}


def test_what_two_classes_hold_together_is_neither_ones_own() -> None:
    tied = model("mine", "free")
    tied.theirs.weight = tied.own.weight
    given = policy(twice((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)), parameters=PARAMETERS[:2])
    found = isolated_pairs(tied, given, [0, 1], tuple)
    assert [reasons[0].partition(",")[0] for reasons in found.values()] == [
        "rows of other classes read own.weight of 'own'"
    ] * 2
    assert set(found) == {("free", "own"), ("mine", "own")}


def test_classes_that_the_taxonomy_lacks_are_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"modules of class 'a', 'b', and the taxonomy.*: it has free, mine, late\. Mend"
    ):
        isolated_pairs(model("b", "a"), policy(twice(OPEN, OPEN, OPEN)), [0], tuple)
    with pytest.raises(PlanError, match=r"modules of class 'gone', and"):
        isolated_pairs(model("gone", "free"), policy(twice(OPEN, OPEN, OPEN)), [], tuple)


# -------------------------------------------------------------------------------------------------- another policy


KEPT: Mapping[tuple[Promise, tuple[str, str] | None], bool] = {
    (Promise.RESUME, None): True,
    (Promise.NO_DIRECT_WRITE, ("free", "own")): True,
    (Promise.NO_DIRECT_WRITE, ("mine", "base")): True,
    (Promise.NO_DIRECT_WRITE, ("late", "own")): False,
    (Promise.ISOLATED, ("mine", "own")): True,
}


def plan() -> Plan:
    facts = Facts(num_microbatches=1, rows_per_microbatch=1, positional_data=True)
    return Plan((), tuple(Guarantee(p, holds, "as it was", pair) for (p, pair), holds in KEPT.items()), facts)


def changed(after: Plan) -> dict[str, str]:
    """What was taken back, and why."""
    then, now = plan().guarantees, after.guarantees
    assert [g.name for g in now] == [g.name for g in then]
    return {one.name: one.because for was, one in zip(then, now, strict=True) if one != was}


QUIET = policy(((OPEN, OPEN), (MINE, MINE), (OPEN, OPEN)))


def test_a_policy_that_keeps_what_was_promised_takes_nothing_back() -> None:
    assert changed(without_admitted(plan(), model(), QUIET, [0, 1], 10)) == {}


def test_rows_that_teach_what_was_denied_take_it_back() -> None:
    given = policy(((OPEN, (1.0, 0.5, 0.0)), (MINE, MINE), (OPEN, OPEN)))
    told = changed(without_admitted(plan(), model(), given, [0, 1], 3))
    assert told == {
        "no_direct_write(free, own)": "from step 3 on another policy lets rows of free teach own",
        "isolated(mine, own)": (
            "from step 3 on another policy is in force, by which free may teach 'own', too: give them weight 0 there"
        ),
    }
    assert set(changed(without_admitted(plan(), model(), given, [1, 2], 3))) == {"no_direct_write(free, own)"}


def test_what_was_not_promised_any_more_keeps_its_reason() -> None:
    given = policy(((OPEN, OPEN), (MINE, MINE), (OPEN, (0.0, 1.0, 0.0))))
    assert changed(without_admitted(plan(), model(), given, [0, 1], 3)) == {}


@pytest.mark.parametrize(("step", "counts"), [(0, True), (9, True), (10, False), (11, False)])
def test_phases_that_end_before_the_step_do_not_count(step: int, counts: bool) -> None:
    before = policy((((1.0, 1.0, 0.0), OPEN), (MINE, MINE), (OPEN, OPEN)))
    told = changed(without_admitted(plan(), model(), before, [0, 1], step))
    assert set(told) == ({"no_direct_write(free, own)", "isolated(mine, own)"} if counts else set())


def test_a_class_that_teaches_what_was_denied_is_isolated_no_longer() -> None:
    given = policy(((OPEN, OPEN), (MINE, (1.0, 1.0, 0.0)), (OPEN, OPEN)))
    told = changed(without_admitted(plan(), model(), given, [0, 1], 3))
    assert set(told) == {"no_direct_write(mine, base)", "isolated(mine, own)"}
    assert "mine may teach base, too" in told["isolated(mine, own)"]
