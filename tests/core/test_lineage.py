"""Lineage against lists of Python: whatever is selected, mixed, buried and sent to another process."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.lineage import TOMBSTONE, Lineage
from cosmati.errors import BatchError

_CLASSES = [2, 0, 1, 1, 0, 2]
_STEPS = st.lists(st.tuples(st.sampled_from(["select", "mix", "bury", "send"]), st.integers(0, 2**30)), max_size=4)


@given(steps=_STEPS, is_known=st.booleans())
def test_a_row_keeps_its_parents_and_their_classes(steps: list[tuple[str, int]], is_known: bool) -> None:
    """A row is a list of parents and classes; its own stand first."""
    lineage: Any = Lineage(torch.arange(6), torch.tensor(_CLASSES)) if is_known else Lineage.of_rows(0, 6)
    rows = [[(number, _CLASSES[number] if is_known else 0)] for number in range(6)]
    for step, seed in steps:
        places = torch.randint(0, len(rows), (len(rows),), generator=torch.Generator().manual_seed(seed))
        if step == "select":
            lineage, rows = lineage.select(places), [rows[place] for place in places.tolist()]
        elif step == "mix":
            lineage = lineage.mix(places)
            rows = [row + rows[place] for row, place in zip(rows, places.tolist(), strict=True)]
        elif step == "bury":
            gone = places % 2 == 0
            lineage = lineage.without(gone)
            buried = [[(TOMBSTONE, one) for _, one in row] for row in rows]
            rows = [dead if is_gone else row for row, dead, is_gone in zip(rows, buried, gone.tolist(), strict=True)]
        else:
            lineage = pickle.loads(pickle.dumps(lineage))
    assert lineage.is_known == is_known
    assert lineage.row_ids.tolist() == [row[0][0] for row in rows]
    assert lineage.class_ids.tolist() == [row[0][1] for row in rows]
    if lineage.parents is None:
        assert lineage.parent_class_ids is None
        assert all(len(row) == 1 for row in rows)
    else:
        assert lineage.parents.tolist() == [[number for number, _ in row] for row in rows]
        assert lineage.parent_class_ids.tolist() == [[one for _, one in row] for row in rows]


def test_packs_are_not_mixed() -> None:
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(BatchError, match="pack after mixing"):
        Lineage(ids, ids, token_class_ids=torch.zeros(2, 3, dtype=torch.int64)).mix(torch.arange(2))


def test_packs_that_are_cut_into_another_number_of_pieces_are_refused() -> None:
    ids, tokens = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(BatchError, match="different numbers of rows"):
        Lineage(ids, ids, token_class_ids=tokens).cut(lambda told: told.reshape(4, 2), pieces=4)


def test_names_that_are_given_at_once_are_those_of_by_names() -> None:
    rows, classes = torch.arange(3), torch.tensor([1, 0, 1])
    named = Lineage(rows, classes, class_names=("a", "b"))
    for one in (named, Lineage(rows, classes).by_names(("a", "b"))):
        assert one.class_names == ("a", "b")
        found = one.numbered_by(("b", "c", "a"))
        assert found.class_ids is not None
        assert (found.class_ids.tolist(), found.class_names) == ([0, 2, 0], ("b", "c", "a"))
    with pytest.raises(BatchError, match="class names weren't"):
        dataclasses.replace(named, class_ids=torch.tensor([0, 0, 0])).numbered_by(("b", "a"))
