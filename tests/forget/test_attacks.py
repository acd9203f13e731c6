"""What attacks say, against counting all pairs, and a model that says only what it was told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.errors import DataError
from cosmati.forget.attacks import extracted, membership_auc

SCORES = st.lists(st.integers(-3, 3) | st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(SCORES, SCORES)
def test_the_auc_is_what_counting_pairs_gives(members: list[float], others: list[float]) -> None:
    won = sum((a > b) + (a == b) / 2 for a in members for b in others)
    assert membership_auc(members, others) == pytest.approx(won / (len(members) * len(others)), abs=1e-12)
    assert membership_auc(others, members) == pytest.approx(1 - membership_auc(members, others), abs=1e-12)


def test_infinite_losses_have_their_place_and_nan_has_none() -> None:
    assert membership_auc([math.inf, 0], [-math.inf, 0]) == 7 / 8
    for wrong in ([], [math.nan]):
        with pytest.raises(DataError, match="needs a score"):
            membership_auc(wrong, [1.0])
        with pytest.raises(DataError, match="needs a score"):
            membership_auc([1.0], wrong)


class Parrot(nn.Module):
    """Goes on with one text, whatever comes before, as long as it was prompted with that text's beginning."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text
        self.drops = nn.Dropout(1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 10)
        for row, own in enumerate(tokens.tolist()):
            knows = own == self.text[: len(own)] and len(own) < len(self.text)
            logits[row, -1, self.text[len(own)] if knows else 9] = 1.0
        return self.drops(logits)


def test_extraction_is_verbatim_to_the_end() -> None:
    model = Parrot([1, 2, 3, 4, 5]).train()
    prompts = torch.tensor([[1, 2], [1, 2], [2, 1]])
    found = extracted(model, prompts, torch.tensor([[3, 4, 5], [3, 4, 6], [3, 4, 5]]))
    assert found.tolist() == [True, False, False]
    assert model.training
