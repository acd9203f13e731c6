"""What a masked layer read is kept for who looks at packs, and for nobody else: it's as large as the activations."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.train.layout.layout import Parameter
from cosmati.train.token_routes import TokenRoute, masking

pytestmark = pytest.mark.long


def taps(*, keep: bool | None) -> tuple[int, bool]:
    """Return how many layers' inputs are kept after a forward and a backward pass, and whether the input is alive."""
    classes = torch.tensor([[0, 1, 1]])
    batch = Batch(torch.ones(1, 3), Lineage(torch.zeros(1).long(), torch.zeros(1).long(), token_class_ids=classes))
    weights = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    linear = nn.Linear(2, 2)
    parameters = [Parameter(index, name, 0, tensor) for index, (name, tensor) in enumerate(linear.named_parameters())]
    told = {} if keep is None else {"keep": keep}
    masks = masking(TokenRoute(weights, frozenset({0}), (), ()), batch, parameters, **told)
    assert masks is not None, "region 0 is mixed"
    tokens = torch.randn(1, 3, 2)
    alive = weakref.ref(tokens.untyped_storage())
    with masks:
        loss: Tensor = linear(tokens).sum()
    with masks.differentiating(loss):
        loss.backward()
    del tokens, loss
    gc.collect()
    return len(masks.tapped), alive() is not None


def test_taps_are_kept_where_that_is_asked() -> None:
    assert taps(keep=True) == (2, True)


def test_a_step_in_training_keeps_none() -> None:
    assert taps(keep=None) == taps(keep=False) == (0, False)
