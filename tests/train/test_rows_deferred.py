"""Rows that a loop of one's own gave while they were deferred, until it gives them again: against plain sets."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.train.deferred_rows import DeferredRows, _rows_by_class


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
