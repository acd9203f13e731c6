"""Routing against a loop over rows in float64, and an all-ones policy against no policy at all."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Classification, InMemory, RunConfig, Trainer, load_policy, software_licences
from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.errors import BatchError
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.routing.policy_file import PolicyFile
from cosmati.testing.rows import gradients_by_row

CLASSES = ("open/copyleft", "open/permissive", "open/psf")
WEIGHTS = {
    "open/copyleft": {"first": 0.0, "middle": 0.5, "last": 1.0},
    "open/permissive": {"first": 1.0, "middle": 1.0, "last": 1.0},
    "open/psf": {"first": 0.25, "middle": 0.0, "last": 1.0},
}


def policy(weights: Mapping[str, Mapping[str, float]]) -> PolicyFile:
    rules = "".join(
        f"  - {{class: {c}, region: {r}, weight: {w}}}\n" for c, row in weights.items() for r, w in row.items()
    )
    regions = "".join(
        f"  {name}: {{params: '{index}.*'}}\n" for name, index in (("first", 0), ("middle", 2), ("last", 4))
    )
    return load_policy(f"version: 1\ntaxonomy: software-licences\nregions:\n{regions}rules:\n{rules}")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def microbatches() -> list[Batch]:
    taxonomy = software_licences()
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(8):
        class_id = taxonomy.id_of(CLASSES[index % 3])
        rows, targets = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        lineage = Lineage(torch.arange(5) + 5 * index, torch.full((5,), class_id))
        found.append(Batch((rows, targets), lineage, class_id))
    return found


def oracle(network: nn.Module) -> dict[str, Tensor]:
    """Take each row alone, times its route, summed, over the number of rows that may teach the region; in float64."""
    network = copy.deepcopy(network).double()
    region_of = {"0": "first", "2": "middle", "4": "last"}
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0)
    for index, batch in enumerate(microbatches()):
        route = WEIGHTS[CLASSES[index % 3]]
        for row, target in zip(batch.input.double(), batch.target, strict=True):
            network.zero_grad()
            nn.functional.cross_entropy(network(row[None]), target[None]).backward()
            for name, parameter in network.named_parameters():
                weight = route[region_of[name[0]]]
                assert parameter.grad is not None
                total[name] += weight * parameter.grad
                teachers[name] += weight > 0
    return {name: value / teachers[name] for name, value in total.items()}


def step_with(network: nn.Module, chosen: PolicyFile | None) -> Trainer:
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    trainer = Trainer(
        network,
        Classification(3),
        optimizers=[optimizer],
        policy=chosen,
        taxonomy=software_licences(),
        config=RunConfig(budget="5ba", num_microbatches=8, num_threads=1),
    )
    with trainer:
        trainer.step_microbatches(microbatches(), [batch.class_id for batch in microbatches()])
    return trainer


def test_routed_gradients_equal_a_loop_over_rows() -> None:
    network = model()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    expected = oracle(network)
    step_with(network, policy(WEIGHTS))
    for name, parameter in network.named_parameters():
        # With SGD at rate 1 the change of a parameter is its gradient.
        torch.testing.assert_close((before[name] - parameter.detach()).double(), expected[name], rtol=2e-5, atol=2e-7)


def test_all_ones_is_the_ungoverned_run_bit_for_bit() -> None:
    governed, ungoverned = model(), model()
    ones = {name: dict.fromkeys(row, 1.0) for name, row in WEIGHTS.items()}
    step_with(governed, policy(ones))
    step_with(ungoverned, None)
    for mine, other in zip(governed.parameters(), ungoverned.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.long
def test_all_ones_is_the_ungoverned_run_for_a_language_model() -> None:
    tokens = torch.randint(0, 32, (64, 9), generator=torch.Generator().manual_seed(2), dtype=torch.int64)

    def train(chosen: PolicyFile | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network = GPT(
            GPTConfig(vocabulary_size=32, sequence_length=8, width=16, num_blocks=2, num_heads=2, dropout=0.1)
        )
        class_ids = torch.full((64,), software_licences().id_of("open/psf"))
        data = InMemory(tokens, 16, class_ids, software_licences().classes)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        config = RunConfig(budget="20ba", num_microbatches=4, num_threads=1)
        Trainer(
            network, mean_loss, data, optimizers=[optimizer], policy=chosen, taxonomy=software_licences(), config=config
        ).fit()
        return network.state_dict()

    regions = "regions:\n  lower: {params: ['embedding*', 'blocks.0.*']}\n"
    regions += "  upper: {params: ['blocks.1.*', 'norm*', 'head*']}\n"
    text = f"version: 1\ntaxonomy: software-licences\n{regions}rules:\n  - {{class: '**', weight: 1}}\n"
    governed, ungoverned = train(load_policy(text)), train(None)
    assert all(torch.equal(governed[name], ungoverned[name]) for name in ungoverned)


def mean_loss(network: nn.Module, data: Tensor) -> Tensor:
    """Return a plain mean, as a user's own loss does."""
    logits = network(data[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


def test_the_shipped_oracle_is_the_loop_over_rows() -> None:
    network, region_of = model().double(), {"0": "first", "2": "middle", "4": "last"}
    names = software_licences().classes

    def mean(own: nn.Module, data: Any) -> Tensor:
        return nn.functional.cross_entropy(own(data[0].double()), data[1])

    found = gradients_by_row(network, microbatches(), lambda c, name: WEIGHTS[names[c]][region_of[name[0]]], mean)
    expected = oracle(network)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)
    # A parameter that no row may teach has no gradient; nor do rows that aren't there.
    assert set(gradients_by_row(network, microbatches(), lambda c, name: float(name == "4.bias"), mean)) == {"4.bias"}
    gone = [Batch(b.data, Lineage(torch.full((5,), TOMBSTONE), b.lineage.class_ids)) for b in microbatches()]
    assert not gradients_by_row(network, gone, lambda c, name: 1.0, mean)
    with pytest.raises(BatchError, match="tells each row's class"):
        gradients_by_row(network, [Batch(microbatches()[0].data, Lineage.of_rows(0, 5))], lambda c, name: 1.0, mean)
