"""Packs of several classes: what is a class's own runs at its tokens alone, or it's refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.isolated import isolated_modules, running
from cosmati.core.labels import IGNORED
from cosmati.core.loss import LanguageModel
from cosmati.core.plan import Promise
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import PlanError
from cosmati.methods import IsolatedAdapters
from cosmati.models.mixture import MixtureConfig, MixtureModel
from cosmati.optim import SGD, AdamW
from cosmati.routing.policy_file import load_policy
from cosmati.train.trainer import Trainer
from tests.train.packs import samples
from tests.train.packs.samples import VOCABULARY, documents, model, source

pytestmark = pytest.mark.long

CHOSEN = load_policy(
    "version: 1\ntaxonomy: t\n"
    "regions: {trunk: {params: '*', exclude: '*.isolated.*'}, own: {tag: isolated/personal}}\nrules:\n"
    "  - {class: '**', weight: 1}\n  - {class: '**', region: own, weight: 0}\n"
    "  - {class: personal, region: trunk, weight: 0}\n  - {class: personal, region: own, weight: 1}\n"
)
PAIR = ("personal", "own")
ADAPTERS = IsolatedAdapters(classes="personal", rank=2)
KINDS = {
    "low rank": ADAPTERS,
    "expert": IsolatedAdapters(classes="personal", layers="blocks.*.feed_forward", kind="expert"),
    "beside": IsolatedAdapters(classes="personal", layers="blocks.*.feed_forward", kind="beside"),
}


def run(data: Any, adapters: IsolatedAdapters = ADAPTERS, network: nn.Module | None = None, **options: Any) -> Trainer:
    options = {"optimizers": [AdamW(lr=0.01)], "budget": "4ba", **options}
    made = samples.trainer(model() if network is None else network, data, CHOSEN, methods=[adapters], **options)
    made.fit()
    return made


def trunk(made: Trainer) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in made.model.state_dict().items() if "isolated" not in n}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["low rank", *(pytest.param(k, marks=pytest.mark.slow) for k in ("expert", "beside"))])
def test_delete_and_swap(kind: str) -> None:
    data, swapped = source(documents()), source(documents(swapped=[2]))
    present, other = run(data, KINDS[kind]), run(swapped, KINDS[kind])
    gone = run(Tombstoned(data, ["personal"]), KINDS[kind])
    assert present.plan.holds(Promise.ISOLATED, PAIR), present.plan
    assert same(trunk(present), trunk(gone))
    assert same(trunk(present), trunk(other))
    own = dict(present.model.state_dict())
    assert not same({n: v for n, v in own.items() if "isolated" in n}, dict(gone.model.state_dict()))


def test_what_a_loss_adds_is_named() -> None:
    """A balance of experts weighs by all labels of a microbatch, those of the class's documents too."""
    config = MixtureConfig(
        vocabulary_size=samples.VOCABULARY, sequence_length=samples.LENGTH, width=8, num_blocks=1, num_heads=2,
        num_experts=2, balance="sequence", dispatch="dense",
    )  # fmt: skip
    made = run(source(documents()), network=MixtureModel(config))
    (found,) = [g for g in made.plan.guarantees if g.promise is Promise.ISOLATED]
    assert not found.holds
    assert found.because.startswith("in packs, what the loss adds (balance) is weighed by the number of labels")
    assert made.plan.holds(Promise.NO_DIRECT_WRITE, ("personal", "trunk"))
    unbalanced = run(source(documents()), network=MixtureModel(dataclasses.replace(config, balance="none")))
    assert unbalanced.plan.holds(Promise.ISOLATED)


def test_adapters_learn_what_each_document_by_itself_teaches() -> None:
    """The oracle: each document alone in float64, with what is its class's own enabled for all of it."""
    network = model(rotary=False).double()
    ADAPTERS.apply(network)
    for module in isolated_modules(network).values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    data = source(documents())
    batches = [data.order(seed=0, num_microbatches=2, route_pure=True).microbatch(0, index) for index in range(2)]
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0)
    for batch in batches:
        classes, pieces = batch.lineage.token_class_ids, batch.data["documents"]
        assert classes is not None
        for row, column in [(r, d) for r in range(len(pieces)) for d in pieces[r].unique().tolist()]:
            chosen = pieces[row] == column
            class_id = int(classes[row][chosen][0])
            tokens, target = batch.data["input"][row][chosen][None], batch.data["target"][row][chosen]
            labels = int((target != IGNORED).sum())
            if class_id < 0 or not labels:
                continue
            network.zero_grad()
            name = samples.CLASSES[class_id]
            with running(isolated_modules(network).values(), {name: True}):
                nn.functional.cross_entropy(network(tokens)[0], target, reduction="sum").backward()
            for key, parameter in network.named_parameters():
                if ("isolated" in key) == (name == "personal") and parameter.grad is not None:
                    total[key] += parameter.grad
                    teachers[key] += labels
    made = run(data, network=network, optimizers=[SGD(lr=1.0)], budget="1ba", loss=samples.exact)
    for key, value in made.model.named_parameters():
        torch.testing.assert_close(start[key] - value.detach(), total[key] / teachers[key], rtol=1e-9, atol=1e-12)


def test_documents_that_see_one_another_withdraw_it() -> None:
    def together(network: nn.Module, data: Any) -> Any:
        return LanguageModel(VOCABULARY)(network, {**data, "documents": torch.zeros_like(data["documents"])})

    made = run(source(documents()), loss=together)
    assert not made.plan.holds(Promise.ISOLATED, PAIR)


class Mixing(nn.Module):
    """PyTorch's attention, whose projections are read as one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.attention(hidden, hidden, hidden)[0])


class Flat(nn.Module):
    """Tokens as one long list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.head(self.embedding(tokens).flatten(0, 1)).unflatten(0, tokens.shape)


@pytest.mark.parametrize(
    ("network", "reason"),
    [(Mixing, "LowRankAttention of class 'personal' can't run for some tokens"), (Flat, "its output is")],
)
def test_what_cant_be_told_apart_by_token_is_refused_by_name(network: type[nn.Module], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        run(source(documents()), network=network())
