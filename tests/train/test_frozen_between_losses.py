"""A loss may freeze what only another sub-step's loss teaches, which thaws it again: bits are as if nobody had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati import Loss, RunConfig, SubStep, Trainer
from cosmati.optim import SGD

SGDS = [SGD(lr=0.1, momentum=0.9, parameters=names) for names in ("0.*", "1.*")]


def adversaries(*, freezes: bool) -> list[SubStep]:
    """A generator's loss through a frozen discriminator, and the discriminator's own."""

    def freeze(model: nn.Module, *, learns: bool) -> None:
        for parameter in model[1].parameters() if freezes else ():  # type: ignore[index]
            parameter.requires_grad_(learns)

    def generate(model: nn.Module, data: Tensor) -> Loss:
        freeze(model, learns=False)
        found = model(data)
        return Loss(found.square().sum(), found.numel())

    def discriminate(model: nn.Module, data: Tensor) -> Loss:
        freeze(model, learns=True)
        found = model[1](model[0](data).detach())  # type: ignore[index]
        return Loss((found - 1).square().sum(), found.numel())

    return [SubStep("generate", generate, "0.*"), SubStep("discriminate", discriminate, "1.*")]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_frozen_discriminator_changes_no_bit(num_microbatches: int) -> None:
    def trained(*, freezes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        config = RunConfig(budget="3ba", num_microbatches=num_microbatches, num_threads=1)
        batches = torch.rand(3, 4, 3)
        with Trainer(model, adversaries(freezes=freezes), optimizers=SGDS, config=config) as trainer:
            for batch in batches:
                trainer.step(batch)
        return list(model.parameters())

    assert all(map(torch.equal, trained(freezes=True), trained(freezes=False)))
    assert all(parameter.requires_grad for parameter in trained(freezes=True))
