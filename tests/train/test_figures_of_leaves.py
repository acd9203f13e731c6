"""Figures by region of several microbatches come back from the table they were put in, and add up as norms do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.errors import BatchError
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.due_details import DueDetails
from cosmati.train.leaf_facts import NO_LEAF, LeafFacts, LeafFigures, even_loss, figures_in, table_of

CPU, NAN = torch.device("cpu"), math.nan


def doubles(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-15, atol=0, equal_nan=True) and one.shape == other.shape


def test_a_leaf_that_is_not_offered_tells_zeros() -> None:
    assert LeafFacts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None) == NO_LEAF


@pytest.mark.parametrize(
    ("counts", "keys", "found"),
    [
        ((3, 5, 7), (4, 6, 0), "[3, 5, 7] labels that aren't ignored (-100): a mean"),
        ((3, 5, 8), (4, 1, 9), "[3, all, 8] labels that aren't ignored (-100): a mean"),
        (
            (3, 3),
            (4, 5),
            "[3, 3] labels that aren't ignored (-100), and not equally many in each of the batch's",
        ),
    ],
)
def test_unequal_labels_are_told_by_microbatch(counts: Any, keys: Any, found: str) -> None:
    with pytest.raises(BatchError) as caught:
        even_loss(torch.ones(()), doubles(*counts), doubles(*keys))
    assert f"have {found}" in str(caught.value)


def test_norms_of_sub_steps_add_up_by_their_squares_and_directions_by_themselves() -> None:
    first = LeafFigures(doubles([3, NAN, NAN]), doubles([[1.0], [NAN], [2.0]]), doubles([7, 8, 9]))
    second = LeafFigures(doubles([4, 5, NAN]), doubles([[2.0], [NAN], [NAN]]), doubles([1, 1, 1]))
    joined = first.joined([second, LeafFigures(), LeafFigures(norms=doubles([12, 0, NAN]))])
    assert same(joined.norms, doubles([13, 5, NAN]))
    assert same(joined.sketches, doubles([[3.0], [NAN], [2.0]]))
    assert joined.entropies is first.entropies
    assert LeafFigures(first.norms).joined([LeafFigures(second.norms)]).sketches is None


def test_the_figures_of_one_sub_step_are_its_own() -> None:
    one = LeafFigures(doubles([1, 2]), None, doubles([3, 4]))
    assert one.joined([]) is one
    assert one.joined([LeafFigures(entropies=doubles([1, 1]))]) is one


def figures(num_regions: int, num: int = 3) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> list[Tensor]:
        return [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(num)]

    return drawn(num_regions), drawn(num_regions, WIDTH), drawn(num_regions)


@pytest.mark.parametrize("has_entropies", [False, True])
@pytest.mark.parametrize("has_sketches", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("is_divided", [False, True])
def test_figures_come_back_from_their_table(
    has_norms: bool, has_sketches: bool, has_entropies: bool, is_divided: bool
) -> None:
    norms, sketches, entropies = figures(2)
    seen = [LeafFacts(1.0, 2.0, 3.0, 4.0, 5.0)] * 3
    kinds = (norms if has_norms else [], sketches if has_sketches else [], entropies if has_entropies else [])
    table = table_of(seen, kinds, 0, CPU)
    due = DueDetails(norms=has_norms, sketch=DirectionSketch(0) if has_sketches else None, entropy=has_entropies)
    by = doubles(2, 5)
    found = figures_in(table[:, 6:], due, by if is_divided else None, 2)
    divided = by if is_divided else doubles(1, 1)
    assert same(found.norms, torch.stack(norms) / divided if has_norms else None)
    assert same(found.sketches, torch.stack(sketches) / divided[:, None] if has_sketches else None)
    assert same(found.entropies, torch.stack(entropies) if has_entropies else None)


def test_an_accelerators_table_stays_there() -> None:
    there = torch.device("meta")
    labels = torch.ones(4, device=there).double()
    seen = [LeafFacts(torch.ones((), device=there), 2.0, 3.0, 4.0, 5.0, labels=labels)] * 2
    norms, sketches, _ = figures(3, 2)
    table = table_of([*seen], (norms, sketches, []), 4, there)
    assert (table.device.type, table.dtype, table.shape) == ("meta", torch.float64, (2, 4 + 6 + 3 + 3 * WIDTH))


def test_labels_by_class_come_first_and_only_where_there_are_classes() -> None:
    seen = [LeafFacts(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, labels=doubles(7, 8)), NO_LEAF]
    assert table_of(seen, ([], [], []), 2, CPU).tolist() == [[7, 8, 1, 2, 3, 4, 5, 6], [0] * 8]
    assert table_of(seen, ([], [], []), 0, CPU).tolist() == [[1, 2, 3, 4, 5, 6], [0] * 6]
