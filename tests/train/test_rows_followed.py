"""What a method may make of a governed microbatch: rows whose classes and number are still known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.errors import PlanError
from cosmati.train.followed import classes_in, refuse_unfollowed

CLASSES = torch.tensor([0, 0, 2, 2])


def lineage(classes: torch.Tensor = CLASSES, **more: Any) -> Lineage:
    return Lineage(torch.arange(len(classes)), classes, **more)


def batch(rows: int = 4, of: Lineage | None = None) -> Batch:
    return Batch(torch.ones(rows, 3), lineage() if of is None else of, None)


GIVEN = batch()


@pytest.mark.parametrize(
    "made",
    [
        GIVEN,
        Batch(torch.zeros(4, 3), GIVEN.lineage, None),
        GIVEN.select(torch.tensor([3, 0])),
        GIVEN.select(slice(2, 4)),
        batch(2, lineage(torch.tensor([2, 0]))),
    ],
)
def test_rows_that_are_still_known_are_taken(made: Batch) -> None:
    refuse_unfollowed(GIVEN, made, object())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.ones(4, 3), "object gave a Tensor, and a Batch is wanted"),
        (Batch(torch.ones(4, 3), Lineage.of_rows(0, 4), None), "gave rows of unknown origin"),
        (Batch(torch.ones(3, 3), GIVEN.lineage, None), "gave rows that nobody can tell"),
        (Batch(torch.ones(5, 3), GIVEN.lineage, None), "gave rows that nobody can tell"),
        (batch(4, lineage(torch.tensor([0, 1, 2, 3]))), r"rows of classes \[0, 2\], and gave some of \[1, 3\]"),
    ],
)
def test_rows_that_nobody_can_tell_are_refused(made: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        refuse_unfollowed(GIVEN, made, object())


def test_rows_of_unknown_origin_stay_so() -> None:
    unknown = Batch(torch.ones(4, 3), Lineage.of_rows(0, 4), None)
    refuse_unfollowed(unknown, Batch(torch.ones(2, 3), Lineage.of_rows(9, 2), None), object())


def test_classes_are_those_of_rows_parents_and_tokens() -> None:
    assert classes_in(GIVEN) == [0, 2]
    mixed = lineage(parents=torch.tensor([[1], [0], [3], [2]]), parent_class_ids=torch.tensor([[0], [0], [5], [2]]))
    assert classes_in(batch(4, mixed)) == [0, 2, 5]
    with pytest.raises(PlanError, match="doesn't say of which classes"):
        classes_in(batch(4, lineage(parents=torch.tensor([[1], [0], [3], [2]]))))
    tokens = torch.tensor([[0, 3, TOMBSTONE]] * 4)
    assert classes_in(batch(4, lineage(token_class_ids=tokens))) == [0, 3]
    kept = torch.tensor([True, True, False, False])
    partly: Any = SimpleNamespace(lineage=lineage(), present=kept)
    assert classes_in(partly) == [0]
