"""What a mask makes of a module's output: what no gradient reaches stays as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cosmati.routing.gradient_routing import _masking


def test_a_part_that_takes_no_gradient_goes_on_as_it_is() -> None:
    mask: Any = SimpleNamespace(has_units=False, path="layer", is_shut=True)
    weight, fixed, seen = torch.ones(2, requires_grad=True), torch.arange(3.0), set[str]()
    learnt, kept, count = _masking(mask, seen)(torch.nn.Identity(), (), (weight * 2.0, fixed, 7))
    assert kept is fixed
    assert count == 7
    assert not learnt.requires_grad
    assert learnt.tolist() == [2.0, 2.0]
    assert seen == {"layer"}
