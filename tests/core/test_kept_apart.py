"""What is loaded lies in memory of its own: who changes it, or what it was loaded from, changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cosmati.core.state import load_model_tensors, optimizer_tensors, restore_optimizer
from cosmati.optim.lion import SignMomentum
from cosmati.optim.schedule_free import ScheduleFree


class Grown(nn.Module):
    """A buffer that isn't there yet, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("none", None)
        self.register_buffer("short", torch.zeros(1))
        self.register_buffer("expanded", torch.zeros(1).expand(3))


def test_buffers_that_a_model_takes_are_its_own() -> None:
    model = Grown()
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    saved |= {"none": torch.ones(2), "short": torch.ones(3), "expanded": torch.arange(3.0)}
    load_model_tensors(model, saved, resumes=True)
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    assert held.keys() == saved.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, saved[name]), name
        assert tensor.data_ptr() != saved[name].data_ptr(), name


def trained(optimizer: torch.optim.Optimizer, weight: Tensor) -> torch.optim.Optimizer:
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [SignMomentum, ScheduleFree])
def test_an_optimizers_state_that_is_loaded_is_its_own(make: type[torch.optim.Optimizer]) -> None:
    weights = [Parameter(torch.eye(2)) for _ in range(2)]
    one, other = (trained(make([weight], lr=0.1), weight) for weight in weights)  # type: ignore[call-arg]
    told = one.state_dict()
    other.load_state_dict(told)
    before = {name: value.clone() for name, value in other.state[weights[1]].items()}
    assert before
    for value in told["state"][0].values():
        value.add_(1)
    assert all(torch.equal(other.state[weights[1]][name], value) for name, value in before.items())


def test_what_a_checkpoint_holds_of_an_optimizer_is_copied_without_a_graph() -> None:
    weight = Parameter(torch.eye(2))
    optimizer = trained(torch.optim.SGD([weight], lr=0.1, momentum=0.9), weight)
    optimizer.state[weight]["of another shape"] = torch.arange(3.0)
    tensors, facts = optimizer_tensors(optimizer, {id(weight): "w"})
    saved = {name: value.clone() for name, value in tensors.items()}
    restore_optimizer(optimizer, {id(weight): "w"}, saved, facts)
    assert optimizer.state[weight].keys() == {"momentum_buffer", "of another shape"}
    for name, value in optimizer.state[weight].items():
        assert not value.requires_grad
        assert torch.equal(value, saved[f"w/{name}"])
        assert value.data_ptr() != saved[f"w/{name}"].data_ptr()
