"""A group that an optimizer is given later is taken on as the first ones were, or refused with nothing lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmati.errors import PlanError
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.muon import OrthogonalizedMomentum
from cosmati.optim.sgdw import DecoupledMomentum


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape))


def test_a_later_group_decays_by_its_own_full_rate() -> None:
    one, other = weights(3), weights(3)
    whole = DecoupledMomentum([{"params": [one]}, {"params": [other], "lr": 0.5}], lr=0.1, weight_decay=0.2)
    added = DecoupledMomentum([later := weights(3)], lr=0.1, weight_decay=0.2)
    added.add_param_group({"params": [last := weights(3)], "lr": 0.5})
    for optimizer in (whole, added):
        for group in optimizer.param_groups:
            group["lr"] /= 2
    for optimizer, parameters in ((whole, (one, other)), (added, (later, last))):
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(one, later)
    assert torch.equal(other, last)
    assert [group["full_lr"] for group in added.param_groups] == [0.1, 0.5]


def test_a_vector_is_refused_later_too_and_the_others_stay() -> None:
    optimizer = OrthogonalizedMomentum([weights(2, 3)], lr=0.1)
    with pytest.raises(PlanError, match=r"1 parameter\(s\) have less than two dimensions \(shapes \[\(3,\)\]"):
        optimizer.add_param_group({"params": [weights(3)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [weights(3, 3)]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("kind", [BoundedAdamW, OrthogonalizedMomentum])
def test_zeros_have_no_sphere_to_stay_on_later_either(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([weights(2, 3)], lr=0.1, weight_decay=0.0, hyperball=True)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match="begin at 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    assert len(optimizer.param_groups) == 1
