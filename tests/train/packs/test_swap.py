"""The swap test, token by token: what a denied class's documents hold moves no region that denies it, in bits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import LanguageModel
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.methods import EMA, SAM, GradientClipping, SelectiveBackprop
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.train.trainer import Trainer
from tests.train.packs.samples import (
    TAXONOMY,
    VOCABULARY,
    documents,
    first_step,
    model,
    policy,
    region_of,
    source,
    trainer,
)

pytestmark = pytest.mark.long

OPTIMIZERS: dict[str, Any] = {
    "SGD": [SGD(lr=0.1, momentum=0.9, weight_decay=0.01)],
    "AdamW": [AdamW(lr=0.01, weight_decay=0.1)],
    "Muon": [Muon(lr=0.02), AdamW(lr=0.01)],
}
METHODS: dict[str, Any] = {
    "none": [],
    "clipping by region": [GradientClipping(clipping_type="norm", clipping_threshold=0.01, per_region=True)],
    "clipping": [GradientClipping(clipping_type="norm", clipping_threshold=0.01)],
    "EMA": [EMA(half_life="2ba", update_interval="1ba")],
    "SAM": [SAM(rho=0.05)],
}
MODELS: dict[str, Any] = {
    "plain": {},
    "tied": {"tied": True},
    "n-grams": {"ngrams": (2, 3)},
    "learnt": {"rotary": False},
}
REGIONS = {
    "embedding": "'*', exclude: ['blocks.*', 'norm.*']",
    "lower": "['blocks.0.*']",
    "upper": "['blocks.1.*', 'norm.*']",
}
WEIGHTS = {
    "open": dict.fromkeys(REGIONS, 1.0),
    "doubtful": {"embedding": 0.0, "lower": 0.0, "upper": 1.0},
    "personal": {"embedding": 0.5, "lower": 0.25, "upper": 0.0},
}


def run(network: nn.Module, swapped: tuple[int, ...], **options: Any) -> tuple[Trainer, dict[str, Tensor]]:
    """Train for a step, and return where parameters are, and the averages of them."""
    # One step: after two, what other regions have learnt acts through the activations.
    made = trainer(network, source(documents(swapped=swapped)), policy(WEIGHTS, REGIONS), **options)
    made.fit()
    return made, {name: p.detach().clone() for name, p in network.named_parameters()}


def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Return the regions that differ."""
    regions = {name: "embedding" if name.startswith("head") else region_of(name) for name in one}
    return {regions[name] for name in one if not torch.equal(one[name], other[name])}


ALL = list(itertools.product(MODELS, OPTIMIZERS, METHODS))
SAMPLE = random.Random(3).sample(ALL, 8)


def swap(combination: tuple[str, str, str]) -> None:
    options, optimizers = MODELS[combination[0]], OPTIMIZERS[combination[1]]
    methods = METHODS[combination[2]]
    runs = {
        swapped: run(model(**options), swapped, optimizers=optimizers, methods=methods) for swapped in ((), (1,), (2,))
    }
    (made, plain), (_, doubtful), (_, personal) = runs.values()
    promised = made.plan.holds(Promise.NO_DIRECT_WRITE)
    couples = [type(method).__name__ for method in methods if "regions" in method.couples]
    assert promised == (not couples)
    assert promised == (moved(plain, doubtful) == {"upper"})
    assert promised == (moved(plain, personal) == {"embedding", "lower"})


@pytest.mark.parametrize("combination", SAMPLE, ids=", ".join)
def test_the_content_of_a_denied_class_moves_nothing(combination: tuple[str, str, str]) -> None:
    swap(combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [one for one in ALL if one not in SAMPLE], ids=", ".join)
def test_the_content_of_a_denied_class_moves_nothing_however_combined(combination: tuple[str, str, str]) -> None:
    swap(combination)


class Unmasked(GPT):
    """Told of no document: attention sees them all."""

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        del documents
        return super().forward(tokens)


class Normed(GPT):
    """With a layer that couples all tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.last = nn.BatchNorm1d(VOCABULARY, affine=False)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        logits: Tensor = self.last(super().forward(tokens, documents).mT).mT
        return logits


def across(network: nn.Module, data: Any) -> Any:
    """Predict each token, the first of the next document too."""
    shifted = torch.cat([data["input"][:, 1:], data["input"][:, :1]], dim=1)
    return LanguageModel(VOCABULARY)(network, {**data, "target": shifted})


def balanced(network: nn.Module, data: Any) -> Any:
    """A term of all tokens together."""
    loss = LanguageModel(VOCABULARY)(network, data)
    probabilities = network(data["input"], data["documents"]).softmax(-1).mean((0, 1))
    return replace(loss, aux={"balance": probabilities.square().sum()})


def rare_first(network: nn.Module, data: Any) -> Any:
    """Weigh everything by how many labels of the microbatch are the first token."""
    loss = LanguageModel(VOCABULARY)(network, data)
    share = 1 + (data["target"] == 0).sum()
    return replace(loss, sum=loss.sum * share, per_row=None)


LEAKS: dict[str, tuple[Any, Any, str]] = {
    "attention across documents": (Unmasked, None, "reads, at one document's tokens, what follows from another's"),
    "labels across a border": (GPT, across, "the gradient at"),
    "a term of all tokens": (GPT, balanced, "the gradient at"),
    "a weight that follows from all labels": (GPT, rare_first, "the gradient at"),
}


@pytest.mark.parametrize(("make", "loss", "because"), LEAKS.values(), ids=LEAKS)
def test_documents_that_reach_one_another_withdraw_the_promise_by_name(make: Any, loss: Any, because: str) -> None:
    made = trainer(make(model().config), source(documents()), policy(WEIGHTS, REGIONS), loss=loss)
    assert made.plan.holds(Promise.NO_DIRECT_WRITE)
    made.fit()
    broken = [g for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert len(broken) == 3
    assert all(not g.holds and because in g.because for g in broken)


def test_what_couples_rows_is_named_before_anything_runs() -> None:
    made = trainer(Normed(model().config), source(documents()), policy(WEIGHTS, REGIONS))
    broken = [g for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert broken
    assert all(not g.holds and "last couples rows" in g.because for g in broken)


@pytest.mark.parametrize("first", [0, 3])
def test_packs_of_a_loop_of_ones_own_are_looked_at_when_they_first_come(first: int) -> None:
    packed = first_step(PackedSource(InMemory(pack_tensors(documents()), 4), TAXONOMY.classes))
    pure = [Batch(b.data, Lineage(b.lineage.row_ids, torch.ones(2, dtype=torch.int64)), 1) for b in packed]
    made = trainer(Unmasked(model().config), None, policy(WEIGHTS, REGIONS), budget="5ba")
    with made:
        for _ in range(first):
            made.step_microbatches(pure, [1, 1])
        assert made.plan.holds(Promise.NO_DIRECT_WRITE)
        made.step_microbatches(packed, [None, None])
        assert not made.plan.holds(Promise.NO_DIRECT_WRITE)


def test_a_method_that_couples_rows_is_named_when_packs_first_come() -> None:
    packed = first_step(PackedSource(InMemory(pack_tensors(documents()), 4), TAXONOMY.classes))
    method = SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)
    made = trainer(model(), None, policy(WEIGHTS, REGIONS), methods=[method])
    assert made.plan.holds(Promise.NO_DIRECT_WRITE)
    with made:
        made.step_microbatches(packed, [None, None])
    broken = [g.because for g in made.plan.guarantees if g.promise is Promise.NO_DIRECT_WRITE]
    assert all("SelectiveBackprop" in because and "couples rows" in because for because in broken)
