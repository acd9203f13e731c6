"""A batch whose rows nobody counts trains alike, whoever watches: only the first one of a run is looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati import Observer, RunConfig, Trainer
from cosmati.core.batch import Batch, Lineage
from cosmati.optim import SGD


class Reads(nn.Module):
    """Reads two tensors, of lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        return (rows @ self.weight).sum() * table.sum()


def batch(length: int, first: int, *, has_lineage: bool) -> object:
    data = torch.ones(4, 3), torch.ones(length)
    return Batch(data, Lineage.of_rows(first, 4), None) if has_lineage else data


@pytest.mark.parametrize("has_lineage", [False, True])
@pytest.mark.parametrize("observers", [[], [Observer()]], ids=["alone", "watched"])
def test_a_later_batch_may_hold_tensors_of_unlike_lengths(observers: list[Observer], has_lineage: bool) -> None:
    """Each step moves the weights by 4 rows of ones times the length of its table."""
    model = Reads()
    data = [batch(length, 4 * n, has_lineage=has_lineage) for n, length in enumerate((4, 7, 4))]
    config = RunConfig(budget="3ba", num_threads=1)
    trainer = Trainer(
        model, lambda model, data: model(*data), data, optimizers=SGD(lr=0.125), observers=observers, config=config
    )
    trainer.fit()
    assert trainer.clock.rows == 12
    assert model.weight.tolist() == [1 - 0.125 * 4 * (4 + 7 + 4)] * 3
