"""What packs teach against each document by itself, in float64; and an all-ones policy against none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.labels import IGNORED
from cosmati.core.loss import Loss
from cosmati.methods import EMA
from cosmati.optim import SGD, AdamW, Muon
from cosmati.optim.optimizers import assign_parameters
from tests.train.packs.samples import (
    CLASSES,
    REGIONS,
    VOCABULARY,
    WEIGHTS,
    documents,
    exact,
    first_step,
    model,
    oracle,
    policy,
    region_of,
    source,
    trainer,
    values,
)

pytestmark = pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learnt positions, RMS norm": {"rotary": False, "normalisation": "rms"},
    "n-grams": {"ngrams": (2,), "ngram_rows": 16},
    "all scores": {"all_scores": True, "qk_norm": True, "activation": "relu_squared"},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_each_region_learns_what_each_document_alone_may_teach_it(options: dict[str, Any]) -> None:
    network, data = model(**options).double(), source(documents())
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(), loss=exact).fit()
    for name, parameter in network.named_parameters():
        # With SGD at rate 1 the change of a parameter is its gradient.
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_each_use_of_a_tied_embedding_is_masked() -> None:
    weights = {name: {r: w for r, w in row.items() if r != "head"} for name, row in WEIGHTS.items()}
    regions = {**REGIONS, "embedding": "[embedding.*, head.*]"}
    del regions["head"]
    network, data = model(tied=True).double(), source(documents())
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, name: weights[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(weights, regions), loss=exact).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def mean_loss(network: nn.Module, data: Any) -> Tensor:
    """Return a plain mean, as a user's own loss does."""
    return exact(network, data).mean()


def test_a_scalar_is_weighed_by_the_labels_that_may_teach() -> None:
    network = model().double()
    data = source(documents()[:1] * 4)  # A scalar has to be a mean over equally many labels in each microbatch.
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
    trainer(network, data, policy(), loss=mean_loss).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


class Mixed(nn.Module):
    """Layers with biases, a layer norm with one, a causal convolution of one token, and a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=3)
        self.up = nn.Linear(6, 8)
        self.convolution = nn.Conv1d(8, 8, 1)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.norm = nn.LayerNorm(8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        del documents
        hidden = self.act(self.up(self.embedding(tokens)))
        hidden = self.convolution(hidden.mT).mT
        logits: Tensor = self.head(self.norm(self.scale * hidden + self.shift))
        return logits


MIXED = {"embedding": "[embedding.*]", "lower": "['up.weight', 'convolution.*']", "upper": "['scale', 'up.bias']"}
MIXED["head"] = "['shift', 'norm.*', 'head.*']"


def test_layers_of_other_kinds() -> None:
    weights = {**WEIGHTS, "personal": {"embedding": 0.5, "lower": 0.25, "upper": 0.0, "head": 0.3}}
    network, data = Mixed().double(), source(documents())
    before = values(network)
    names = {"up.bias": "upper", "scale": "upper", "up.weight": "lower", "embedding.weight": "embedding"}

    def weight_of(class_id: int, name: str) -> float:
        region = names.get(name, "lower" if name.startswith("convolution") else "head")
        return weights[CLASSES[class_id]][region]

    expected = oracle(network, first_step(data), weight_of)
    trainer(network, data, policy(weights, MIXED), loss=exact).fit()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)])
def test_all_ones_is_the_ungoverned_run_bit_for_bit(optimizer: Any, precision: str) -> None:
    ones = {name: dict.fromkeys(row, 1.0) for name, row in WEIGHTS.items()}
    runs = [model(dropout=0.1), model(dropout=0.1)]
    for network, chosen in zip(runs, (policy(ones), None), strict=True):
        options: Any = {"config": {"precision": precision}, "methods": [EMA(half_life="2ba", update_interval="1ba")]}
        trainer(network, source(documents()), chosen, optimizers=[optimizer], budget="4ba", **options).fit()
    assert all(map(torch.equal, values(runs[0]).values(), values(runs[1]).values()))


def test_a_region_that_all_classes_may_teach_is_that_of_the_ungoverned_run() -> None:
    """What the head learns in a step doesn't follow from what other regions may."""
    runs = [model(), model()]
    for network, chosen in zip(runs, (policy(), None), strict=True):
        trainer(network, source(documents()), chosen).fit()
    one, other = map(values, runs)
    assert torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(one["norm.weight"], other["norm.weight"])


def test_a_rejected_class_is_left_out_of_the_forward_pass() -> None:
    weights = {name: row for name, row in WEIGHTS.items() if name != "personal"}
    seen: list[Any] = []

    def looked_at(network: nn.Module, data: Any) -> Loss:
        seen.append(data)
        return exact(network, data)

    network, data = model().double(), source(documents())
    before = values(network)
    expected = oracle(network, first_step(data), lambda c, n: weights.get(CLASSES[c], {}).get(region_of(n), 0.0))
    trainer(network, data, policy(weights), loss=looked_at).fit()
    for batch, given in zip(first_step(data), seen[-2:], strict=True):
        assert batch.lineage.token_class_ids is not None
        gone = batch.lineage.token_class_ids == CLASSES.index("personal")
        assert gone.any()
        assert (given["input"][gone] == 0).all()
        assert (given["target"][gone] == IGNORED).all()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(before[name] - parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("names", [["SGD"], ["AdamW"], ["Muon", "AdamW"]], ids="+".join)
def test_optimizers_are_given_what_the_documents_alone_would_give(names: list[str]) -> None:
    """Two steps on gradients taken document by document, and applied by hand, are the run's."""
    made = {"SGD": SGD(lr=0.1, momentum=0.9, weight_decay=0.01), "AdamW": AdamW(lr=0.01), "Muon": Muon(lr=0.02)}
    network, by_hand, data = model().double(), model().double(), source(documents(), rows_per_step=2)
    trainer(network, data, policy(), loss=exact, optimizers=[made[name] for name in names], budget="2ba").fit()
    named = list(by_hand.named_parameters())
    shares = assign_parameters([made[name] for name in names], named)
    optimizers = [made[name].build(share) for name, share in zip(names, shares, strict=True)]
    order = data.order(seed=0, num_microbatches=2, route_pure=True)
    for step in range(2):
        batches = [order.microbatch(step, index) for index in range(2)]
        found = oracle(by_hand, batches, lambda c, name: WEIGHTS[CLASSES[c]][region_of(name)])
        for name, parameter in named:
            parameter.grad = found[name]
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in named:
        torch.testing.assert_close(parameter, network.get_parameter(name), rtol=1e-9, atol=1e-11)
