"""Models as others write them, cut: the same as with `detach` written into their forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.routing.gradient_routing import GradientMask, GradientRouting
from cosmati.routing.selective_masking import SelectiveGradientMasking
from tests.train.strategies.samples import CLASSES, gradients

REGIONS = {"stem": "stem.*", "mid": "mid.*", "head": "head.*"}
ONES = dict.fromkeys(CLASSES, dict.fromkeys(REGIONS, 1.0))
DENIED = {name: {"stem": 1.0, "mid": 0.0, "head": 1.0} for name in CLASSES}

Cut = Callable[[Tensor], Tensor]


class Zoo(nn.Module):
    """A stem, something in the middle, a head; the middle's output passes `cut`."""

    def __init__(self, kind: str, cut: Cut = lambda tensor: tensor, *, is_part: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.cut, self.is_part = kind, cut, is_part
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.mid: nn.Module = {
            "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "convolution": lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.GroupNorm(2, 8)),
        }.get(kind, lambda: nn.Linear(8, 8))()
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.stem(rows)
        match self.kind:
            case "lstm":
                found, (last, _) = self.mid(hidden[:, None])
                found = self.cut(found)[:, 0] + (last[0] if self.is_part else self.cut(last)[0])
            case "attention":
                found = self.cut(self.mid(hidden[:, None], hidden[:, None], hidden[:, None])[0])[:, 0]
            case "encoder":
                found = self.cut(self.mid(hidden[:, None]))[:, 0]
            case "convolution":
                found = self.cut(self.mid(hidden[:, :, None]))[:, :, 0]
            case "in place":
                found = self.cut(self.mid(hidden))
                found *= 2
            case "checkpointed":
                found = checkpoint(lambda h: torch.tanh(self.cut(self.mid(h))), hidden, use_reentrant=False)
            case _:
                found = self.cut(self.mid(hidden))
        return self.head(hidden + found)


KINDS = ["linear", "lstm", "attention", "encoder", "convolution", "in place", "checkpointed"]


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_denied_is_as_detached(kind: str) -> None:
    found = gradients(Zoo(kind), DENIED, GradientRouting(), regions=REGIONS)
    expected = gradients(Zoo(kind, Tensor.detach), DENIED, regions=REGIONS)
    close(found, expected)
    assert not np.allclose(found["stem.weight"], gradients(Zoo(kind), DENIED, regions=REGIONS)["stem.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_as_by_the_papers_formula(kind: str) -> None:
    mask = GradientMask(classes="**", module="mid", units=(2, 7), weight=0.3, dim=1 if kind == "convolution" else -1)
    part = torch.tensor([1, 1, 0.3, 0.3, 0.3, 0.3, 0.3, 1], dtype=torch.float64)
    part = part[:, None] if kind == "convolution" else part
    found = gradients(Zoo(kind), ONES, GradientRouting(cuts=(mask,)), regions=REGIONS)
    other = Zoo(kind, lambda x: part * x + (1 - part) * x.detach(), is_part=True)
    close(found, gradients(other, ONES, regions=REGIONS))


@pytest.mark.parametrize("kind", KINDS)
def test_the_forget_region_reads_as_zeros(kind: str) -> None:
    """Whatever keeps its weights in a list of its own, and computed anew in backward."""
    emptied = Zoo(kind)
    with torch.no_grad():
        for parameter in emptied.mid.parameters():
            parameter.zero_()
    network = Zoo(kind)
    before = [p.detach().clone() for p in network.mid.parameters()]
    found = gradients(network, DENIED, SelectiveGradientMasking(forget="mid"), regions=REGIONS)
    close(found, gradients(emptied, DENIED, regions=REGIONS))
    assert all(map(torch.equal, network.mid.parameters(), before))
