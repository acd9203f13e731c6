"""Samples of rows: what is the same set, what overlaps, and by how much."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import Batch, Lineage
from cosmati.study.evaluated_rows import row_sample
from cosmati.study.row_sample import COMMON_ROWS, SAMPLE_SIZE, joined, shared_share, smallest
from cosmati.train.evaluation import batches

X = torch.randn(4000, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(4000) % 5


def sample(start: int, end: int, rows: int = 100) -> tuple[str, ...]:
    return row_sample(batches((X[start:end], Y[start:end]), rows))


def test_it_depends_neither_on_order_nor_on_batches() -> None:
    found = sample(0, 1000)
    assert found == sample(0, 1000, rows=7)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    assert found == row_sample([(X[order], Y[order])])
    assert found == row_sample([Batch((X[:1000], Y[:1000]), Lineage.of_rows(0, 1000))])
    assert found == row_sample([(X[:1000].numpy(), Y[:1000].numpy())])
    assert len(found) == SAMPLE_SIZE
    assert list(found) == sorted(set(found))


def test_one_value_of_a_row_makes_it_another() -> None:
    changed = Y[:50].clone()
    changed[3] += 1
    one, other = row_sample([(X[:50], Y[:50])]), row_sample([(X[:50], changed)])
    assert len(set(one) & set(other)) == 49


def numbered(start: int, end: int) -> tuple[str, ...]:
    return smallest(hashlib.sha256(str(number).encode()).hexdigest()[:12] for number in range(start, end))


def test_too_few_rows_to_compare_say_nothing() -> None:
    """Of 200 rows and 10,000 about three are below the smaller sample's end: none in common is luck."""
    found = [shared_share(numbered(start, start + 200), numbered(0, 10_000)) for start in range(9_800, 10_001, 20)]
    assert found[-1] is None
    assert all(share is None or share > COMMON_ROWS for share in found), "never told to be apart"
    assert shared_share(numbered(100, 200), numbered(0, 100)) == 0.0, "both are known whole"
    assert shared_share(numbered(10_000, 20_000), numbered(0, 10_000)) == 0.0, "a hundred are compared"


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, 1000), (0, 1000), 1.0),
        ((0, 1000), (1000, 2000), 0.0),
        ((0, 100), (0, 4000), 1.0),  # a small part of the rows
        ((0, 50), (25, 75), 0.5),
        ((0, 2000), (1500, 4000), 0.25),
        ((0, 2000), (1000, 4000), 0.5),
    ],
)
def test_the_share_of_rows_that_two_sets_have_in_common(
    one: tuple[int, int], other: tuple[int, int], share: float
) -> None:
    found = shared_share(sample(*one), sample(*other))
    assert found == pytest.approx(share, abs=0.0 if share in (0.0, 1.0) else 0.15)
    assert found == shared_share(sample(*other), sample(*one))


@pytest.mark.parametrize(
    "data",
    [DataLoader(TensorDataset(X, Y), batch_size=100), [], [{"text": "a"}], [object()], [(X[:3], Y[:2])]],
)
def test_what_cannot_be_read_is_not_known(data: object) -> None:
    assert row_sample(data) == ()  # type: ignore[arg-type]
    assert shared_share((), sample(0, 10)) is None
    assert joined([(), sample(0, 10)]) == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float64])
def test_rows_of_any_type_are_told_apart(dtype: torch.dtype) -> None:
    rows = (X[:20].abs() * 2 ** torch.arange(3)).to(dtype)
    distinct = len({row.tobytes() for row in rows.view(torch.uint8).reshape(20, -1).numpy()})
    assert len(row_sample([rows])) == distinct
    assert len(row_sample([np.arange(20).reshape(20, 1)])) == 20


def test_samples_are_joined_to_that_of_all() -> None:
    assert joined([sample(0, 1000), sample(1000, 2000)]) == sample(0, 2000)
    assert joined([]) == ()
