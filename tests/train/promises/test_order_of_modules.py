"""What modules run by each other's names is found in whichever order they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.reach import said_within
from cosmati.train.trainer import Trainer

DECAYED = {"mean": 1.0}


class Embedding(nn.Linear):
    """A layer with a method that nobody names but the head, and that changes what its file keeps."""

    def unembed(self, hidden: Tensor) -> Tensor:
        DECAYED["mean"] *= 0.9
        return hidden @ self.weight.T * DECAYED["mean"]


class Head(nn.Module):
    """Output weights that are the embedding's."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding, self.out = embedding, nn.Linear(6, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.out(self.embedding.unembed(hidden))
        return scores


class Tied(nn.Module):
    """An embedding and a head, in one order or the other."""

    def __init__(self, *, is_head_first: bool) -> None:
        super().__init__()
        embedding = Embedding(6, 6)
        parts = {"embedding": embedding, "head": Head(embedding)}
        for name in sorted(parts, reverse=is_head_first):
            self.add_module(name, parts[name])

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(rows))
        return scores


@pytest.mark.parametrize("is_head_first", [False, True])
def test_state_behind_a_method_that_a_later_module_names_withdraws_promises(*, is_head_first: bool) -> None:
    rows = torch.ones(8, 6), torch.arange(8) % 3
    config = RunConfig(budget="3ba", num_threads=1)
    model = Tied(is_head_first=is_head_first)
    trainer = Trainer(model, Classification(3), [rows] * 9, optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    assert not trainer.plan.holds(Promise.RESUME)
    assert "unembed.DECAYED" in str(trainer.plan)


class First(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows

    def third(self) -> None:
        self.last_of_all = 1


class Second(nn.Module):
    def second(self) -> Callable[[], None]:
        return self.third  # type: ignore[return-value]


def test_names_lead_on_until_there_are_no_more() -> None:
    for kinds in ((First, Second), (Second, First)):
        model = nn.Sequential(*(kind() for kind in kinds))
        said = said_within(model, frozenset({"second"}))
        assert {"second", "third", "last_of_all"} <= said
        assert not said_within(model, frozenset({"other"})) & {"third", "last_of_all"}
