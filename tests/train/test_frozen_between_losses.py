"""A loss may freeze what only another sub-step's loss teaches, which thaws it again: bits are as if nobody had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cosmati import Loss, RunConfig, SubStep, Trainer
from cosmati.core.batch import Batch
from cosmati.errors import PlanError
from cosmati.optim import SGD
from tests.train.packs.samples import documents, exact, model, policy, source, trainer

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
        network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        config = RunConfig(budget="3ba", num_microbatches=num_microbatches, num_threads=1)
        batches = torch.rand(3, 4, 3)
        with Trainer(network, adversaries(freezes=freezes), optimizers=SGDS, config=config) as run:
            for batch in batches:
                run.step(batch)
        return list(network.parameters())

    assert all(map(torch.equal, trained(freezes=True), trained(freezes=False)))
    assert all(parameter.requires_grad for parameter in trained(freezes=True))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_nor_does_it_where_tokens_are_routed(num_microbatches: int) -> None:
    regions = {"first": "['blocks.0.*']", "second": "['blocks.1.*']"}
    weights = {"open": dict.fromkeys(regions, 1.0), "doubtful": {"first": 0.0, "second": 1.0}}
    chosen = policy(weights | {"personal": {"first": 1.0, "second": 0.0}}, regions)

    def trained(*, freezes: bool) -> list[Tensor]:
        network = model().double()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith("blocks."))

        def loss_of(number: int) -> Callable[[nn.Module, Batch], Loss]:
            def loss(network: nn.Module, batch: Batch) -> Loss:
                for parameter in network.blocks[1].parameters() if freezes else ():  # type: ignore[index, union-attr]
                    parameter.requires_grad_(number == 1)
                return exact(network, batch)

            return loss

        turns = [SubStep(str(number), loss_of(number), f"blocks.{number}.*") for number in (0, 1)]
        sgds = [SGD(lr=0.1, parameters=f"blocks.{number}.*") for number in (0, 1)]
        data = source(documents())
        trainer(
            network, data, chosen, loss=turns, optimizers=sgds, budget="2ba", num_microbatches=num_microbatches
        ).fit()
        return list(network.parameters())

    assert all(map(torch.equal, trained(freezes=True), trained(freezes=False)))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_nobody_thaws_is_refused_by_name_and_stays_as_it_was(num_microbatches: int) -> None:
    def generate(model: nn.Module, data: Tensor) -> Loss:
        model[1].requires_grad_(requires_grad=False)  # type: ignore[index]
        found = model(data)
        return Loss(found.square().sum(), found.numel())

    def discriminate(model: nn.Module, data: Tensor) -> Loss:
        found = model(data)
        return Loss(found.sum(), found.numel())

    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    before = [parameter.detach().clone() for parameter in network[1].parameters()]
    turns = [SubStep("generate", generate, "0.*"), SubStep("discriminate", discriminate, "1.*")]
    config = RunConfig(budget="3ba", num_microbatches=num_microbatches, num_threads=1)
    run = Trainer(network, turns, optimizers=SGDS, config=config)
    with pytest.raises(PlanError, match=r"1\.weight trained, and doesn't now: a loss has frozen it"):
        run.step(torch.rand(4, 3))
    assert all(map(torch.equal, before, network[1].parameters()))
    assert not any(parameter.requires_grad for parameter in network[1].parameters())
