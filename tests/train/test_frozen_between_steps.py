"""A parameter that somebody freezes between two steps is named in the next one; within a step a loss may freeze."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Loss, RunConfig, SubStep, Trainer
from cosmati.errors import PlanError
from cosmati.optim import SGD

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
ROWS = torch.arange(12.0).reshape(4, 3) / 12


def squared(model: nn.Module, data: Tensor) -> Loss:
    output = model(data)
    return Loss(output.square().sum(), output.numel())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def made(model: nn.Module, loss: Any = squared, globs: tuple[str, ...] = ("*",)) -> Trainer:
    config = RunConfig(budget="9ba", num_microbatches=2, seed=1, num_threads=1)
    optimizers = [SGD(lr=0.1, parameters=glob) for glob in globs]
    return Trainer(model, loss, optimizers=optimizers, config=config)


@pytest.mark.parametrize("frozen", [*[(name,) for name in NAMES], NAMES[:3], NAMES])
@pytest.mark.parametrize("after", [0, 2])
def test_any_frozen_parameter_is_refused_by_name(frozen: tuple[str, ...], after: int) -> None:
    model = network()
    with made(model) as trainer:
        for _ in range(after):
            trainer.step(ROWS)
        for name in frozen:
            model.get_parameter(name).requires_grad_(requires_grad=False)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(PlanError, match="The model isn't what was planned") as caught:
            trainer.step(ROWS)
        told = "; ".join(f"{name} trained, and doesn't now" for name in sorted(frozen))
        assert f"planned: {told}. " in str(caught.value)
        assert all(map(torch.equal, before, model.parameters()))
        assert trainer.clock.step == after
        model.requires_grad_()
        trainer.step(ROWS)
        assert trainer.clock.step == after + 1
        assert not any(map(torch.equal, before, model.parameters()))


def test_losses_may_freeze_others_parameters_within_a_step() -> None:
    def middle(model: nn.Module, data: Tensor) -> Loss:
        model.get_submodule("0").requires_grad_(requires_grad=False)
        return squared(model, data)

    def last(model: nn.Module, data: Tensor) -> Loss:
        model.get_submodule("0").requires_grad_(trainer.clock.step < 2)
        return squared(model, data)

    model = network().append(nn.Linear(2, 2))
    turns = [SubStep("low", squared, "0.*"), SubStep("middle", middle, "1.*"), SubStep("last", last, "2.*")]
    with made(model, turns, ("0.*", "1.*", "2.*")) as trainer:
        for _ in range(3):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            trainer.step(ROWS)
            assert not any(map(torch.equal, before, model.parameters()))
        with pytest.raises(PlanError, match=r"0\.bias trained, and doesn't now; 0\.weight trained"):
            trainer.step(ROWS)
        assert trainer.clock.step == 3
        model.requires_grad_()
