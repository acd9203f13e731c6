"""Rows that a loop of one's own gave while they were deferred, until it gives them again: against plain sets."""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.routing.policy import CompiledPolicy, RowKind
from cosmati.train.deferred_rows import DeferredRows, _rows_by_class, deferred_phases, warn_of_own_loop
from cosmati.train.routes import Router
from tests.train.hand_made import POLICY

pytestmark = pytest.mark.long


def deferred(*, is_on: bool = True, is_told: bool = True) -> Any:
    made: Any = DeferredRows(None, (), is_told=is_told)
    made._names, made._is_on, made._told = ["a", "b"], is_on, {"a", "b"} if is_told else set()
    return made


def part(rows: list[int]) -> Any:
    return SimpleNamespace(lineage=SimpleNamespace(row_ids=torch.tensor(rows, dtype=torch.int64)), band=0)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sets(st.integers(0, 6) | st.just(TOMBSTONE)),
        st.sampled_from(["defer", "admit", "gate", "reject"]),
    ),
    max_size=8,
)


@given(steps=STEPS, is_on=st.booleans())
def test_rows_wait_until_they_are_given_again_and_learnt_from(steps: Any, is_on: bool) -> None:
    made, waiting = deferred(is_on=is_on), defaultdict[str, set[int]](set)
    for number, (class_id, rows, decision) in enumerate(steps):
        router: Any = SimpleNamespace(decision=lambda *_, of=decision, **__: of)
        made.see([part(sorted(rows))], [class_id], number, router)
        name, own = "ab"[class_id], set(rows) - {TOMBSTONE}
        if is_on and decision == "defer":
            waiting[name] |= own
        elif is_on and decision != "reject":
            waiting[name] -= own
    expected = {name: sorted(rows) for name, rows in sorted(waiting.items()) if rows}
    assert made.num_waiting == {name: len(rows) for name, rows in expected.items()}
    assert {name: rows.tolist() for name, rows in sorted(made.state().items())} == expected
    again = deferred(is_on=False)
    again.restore(made.state())
    assert again.num_waiting == made.num_waiting
    assert again._is_on == bool(expected)


def test_each_class_is_warned_of_once() -> None:
    router: Any = SimpleNamespace(decision=lambda *_, **__: "defer")
    made = deferred(is_told=False)
    for step, warned in ((3, ["a"]), (4, []), (5, ["b"])):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            made.see([part([1])], [1 if step == 5 else 0], step, router)
        assert [str(one.message).partition(", which")[0] for one in found] == [
            f"Step {step} was given rows of {name}" for name in warned
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deferred().see([part([1])], [0], 3, router)


@pytest.mark.parametrize("has_rows", [True, False])
def test_of_packs_documents_count_or_packs_where_they_are_not_told_apart(has_rows: bool) -> None:
    classes = torch.tensor([[0, 0, 1], [1, 1, TOMBSTONE]])
    rows = torch.tensor([[5, 6, 7], [7, TOMBSTONE, TOMBSTONE]])
    lineage = SimpleNamespace(row_ids=torch.tensor([20, 21]), by_token=(classes, rows if has_rows else None))
    batch: Any = SimpleNamespace(lineage=lineage)
    expected = {0: {5, 6}, 1: {7}} if has_rows else {0: {20}, 1: {20, 21}}
    assert dict(_rows_by_class(batch, None)) == expected
    assert dict(_rows_by_class(part([3, TOMBSTONE, 4]), 1)) == {1: {3, 4}}


# ----------------------------------------------------------------------------------------- what a policy says of itself

OPEN = dataclasses.replace(POLICY, decision=(("admit", "admit"), ("admit", "gate"), ("reject", "admit")))
ALWAYS = dataclasses.replace(POLICY, decision=(("admit", "admit"), ("defer", "defer"), ("gate", "defer")))


def test_classes_are_deferred_in_phases() -> None:
    assert deferred_phases(None) == deferred_phases(OPEN) == {}
    assert deferred_phases(POLICY) == {"late": ("first",)}
    assert deferred_phases(ALWAYS) == {"bound": ("first", "second"), "late": ("second",)}


def test_a_class_is_deferred_in_a_phase_where_one_kind_of_its_rows_is() -> None:
    kinds = dataclasses.replace(
        POLICY,
        kinds=(RowKind("plain"), RowKind("hard")),
        weight=tuple(one for one in POLICY.weight for _ in range(2)),
        decision=(
            ("admit", "admit"),
            ("admit", "defer"),
            ("admit", "gate"),
            *[("admit", "admit")] * 2,
            ("defer", "gate"),
        ),
    )
    assert deferred_phases(kinds) == {"free": ("second",), "late": ("first",)}


@pytest.mark.parametrize(("policy", "is_on"), [(None, False), (OPEN, False), (POLICY, True)])
@pytest.mark.parametrize("is_told", [True, False])
def test_rows_are_followed_where_the_policy_defers_some(
    policy: CompiledPolicy | None, *, is_on: bool, is_told: bool
) -> None:
    made = DeferredRows(policy, (2, 0) if policy is not None else (), is_told=is_told)
    assert made._names == (["late", "free"] if policy is not None else [])
    assert made._is_on is is_on
    assert made._told == ({"late"} if is_on and is_told else set())
    assert (made.num_waiting, made.state()) == ({}, {})


def test_classes_of_the_source_are_looked_up_and_the_router_is_asked_of_each_part() -> None:
    asked: list[tuple[Any, ...]] = []

    def decision(*given: Any, in_packs: bool) -> str:
        asked.append((*given, in_packs))
        return "defer"

    made, router = DeferredRows(POLICY, (2, 0), is_told=False), cast("Router", SimpleNamespace(decision=decision))
    packs: Any = SimpleNamespace(
        lineage=SimpleNamespace(row_ids=torch.tensor([8]), by_token=(torch.tensor([[1, 1]]), None)), band=3
    )
    with pytest.warns(UserWarning, match=r"^Step 5 was given rows of (late|free), which .* once the class is admitted"):
        made.see([part([4, 2]), packs], [0, None], 5, router)
    assert asked == [(0, 5, 0, False), (1, 5, 3, True)]
    assert made.num_waiting == {"free": 1, "late": 2}
    assert list(made.num_waiting) == ["free", "late"]
    assert {name: (ids.tolist(), ids.dtype) for name, ids in made.state().items()} == {
        "late": ([2, 4], torch.int64),
        "free": ([8], torch.int64),
    }
    with pytest.raises(ValueError, match="zip"):
        made.see([part([4])], [], 5, router)


def test_another_policy_may_defer_what_the_first_did_not_and_what_waits_is_not_forgotten() -> None:
    made = DeferredRows(OPEN, (0, 1, 2), is_told=False)
    made.go_by(OPEN)
    assert made._is_on is False
    made.go_by(POLICY)
    assert made._is_on is True
    made.go_by(OPEN)
    assert made._is_on is True
    again = DeferredRows(POLICY, (0, 1, 2), is_told=False)
    again.restore({})
    assert again._is_on is True


def test_who_has_a_loop_of_its_own_is_told_at_the_start() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_of_own_loop(None) == warn_of_own_loop(OPEN) == ()
    with pytest.warns(UserWarning, match="a loop of your own can't be rescheduled") as caught:
        told = warn_of_own_loop(ALWAYS)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("The policy defers bound in first, second; late in second, and a loop")
    assert told == (
        "rows of bound in first, second that your loop doesn't give again later",
        "rows of late in second that your loop doesn't give again later",
    )
