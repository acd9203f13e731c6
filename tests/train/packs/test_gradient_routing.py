"""Gradient Routing in packs: tokens of a class are cut where it's denied, against its documents one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.labels import IGNORED
from cosmati.core.plan import Promise
from cosmati.data.graded import SourceKind
from cosmati.data.in_memory import InMemory
from cosmati.data.packed import PackedSource, pack_tensors
from cosmati.errors import PlanError
from cosmati.models.gpt import GPT
from cosmati.routing.gradient_routing import GradientMask, GradientRouting
from cosmati.routing.policy_file import load_policy
from cosmati.routing.selective_masking import SelectiveGradientMasking
from tests.train.packs.samples import (
    documents,
    exact,
    first_step,
    model,
    oracle,
    policy,
    source,
    trainer,
    values,
)

pytestmark = pytest.mark.long

REGIONS = {
    "mlp": "['blocks.0.feed_forward.*']",
    "block": "['blocks.1.*']",
    "rest": "'*', exclude: ['blocks.0.feed_forward.*', 'blocks.1.*']",
}
WEIGHTS = {
    "open": dict.fromkeys(REGIONS, 1.0),
    "doubtful": {"mlp": 0.0, "block": 1.0, "rest": 0.5},
    "personal": {"mlp": 0.0, "block": 0.0, "rest": 1.0},
}
CUT = {"open": (), "doubtful": ("blocks.0.feed_forward",), "personal": ("blocks.0.feed_forward", "blocks.1")}


def region_of(name: str) -> str:
    return "mlp" if name.startswith("blocks.0.feed_forward.") else "block" if name.startswith("blocks.1.") else "rest"


def by_document(
    network: GPT,
    microbatches: Any,
    weights: Sequence[Mapping[str, float]] = tuple(WEIGHTS.values()),
    cut: Sequence[Sequence[str]] = tuple(CUT.values()),
) -> dict[str, Tensor]:
    """Each kind of documents by itself, in a model whose modules detach what they give."""
    total: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    teachers = dict.fromkeys(total, 0.0)
    for class_id, paths in enumerate(cut):
        handles = [
            network.get_submodule(path).register_forward_hook(lambda _, __, given: given.detach()) for path in paths
        ]

        def weight_of(own: int, name: str, class_id: int = class_id) -> float:
            return weights[own][region_of(name)] * (own == class_id)

        means = oracle(network, microbatches, weight_of)
        for handle in handles:
            handle.remove()
        labels = sum(int(((b.target != IGNORED) & (b.lineage.token_class_ids == class_id)).sum()) for b in microbatches)
        for name, mean in means.items():
            if weights[class_id][region_of(name)]:
                total[name] += mean * labels
                teachers[name] += labels
    return {name: value / max(1.0, teachers[name]) for name, value in total.items()}


def step(methods: list[Any], data: Any, weights: Mapping[str, Mapping[str, float]] = WEIGHTS) -> tuple[Any, Any, GPT]:
    network = model().double()
    before = values(network)
    run = trainer(network, data, policy(weights, REGIONS), methods=methods, loss=exact)
    run.fit()
    return before, run, network


def test_each_documents_tokens_are_cut_where_its_class_is_denied() -> None:
    data = source(documents())
    expected = by_document(model().double(), first_step(data))
    before, run, network = step([GradientRouting()], data)
    for name, p in network.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), expected[name], rtol=1e-9, atol=1e-12, msg=name)
    assert run.plan.holds(Promise.NO_DIRECT_WRITE)
    _, _, plain = step([], data)
    assert not torch.allclose(plain.embedding.weight, network.embedding.weight, rtol=1e-9)


GRADES = {"high": ({"mlp": 1.0, "block": 1.0}, ()), "low": ({"mlp": 0.0, "block": 1.0}, ("blocks.0.feed_forward",)),
          "none": ({"mlp": 0.0, "block": 0.0}, ("blocks.0.feed_forward", "blocks.1"))}  # fmt: skip


@pytest.mark.parametrize(
    "grades",
    [["high", "low"], ["low", "high"], ["none", "high", "low"]],
    ids=" ".join,
)
def test_a_grade_is_cut_by_its_own_denials_whatever_else_of_its_class_is_there(grades: list[str]) -> None:
    found = documents(24)
    for one in found:
        one.spans[:, 1] = torch.arange(len(one.spans)).remainder(len(grades)).numpy()
    kinds = [SourceKind(0, (("trust", grade),)) for grade in grades]
    data = PackedSource(InMemory(pack_tensors(found), 4, tail="pad"), ["open"] * len(kinds), kinds)
    lowered = "".join(
        f"  - {{class: open, measure: trust, grade: {grade}, region: {region}, factor: 0}}\n"
        for grade, region in (("low", "mlp"), ("none", "mlp"), ("none", "block"))
    )
    text = load_policy(
        "version: 1\ntaxonomy: t\nregions:\n"
        + "".join(f"  {name}: {{params: {globs}}}\n" for name, globs in REGIONS.items())
        + "measures: {trust: {grades: [none, low, high]}}\nrules:\n  - {class: '**', weight: 1}\n"
        + f"attenuate:\n{lowered}"
    )
    network = model().double()
    before = values(network)
    trainer(network, data, text, methods=[GradientRouting()], loss=exact).fit()
    weights, cut = zip(*(GRADES[grade] for grade in grades), strict=True)
    expected = by_document(model().double(), first_step(data), [{**one, "rest": 1.0} for one in weights], cut)
    for name, p in network.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_packs_whose_every_way_to_what_they_may_teach_is_cut_are_refused() -> None:
    """Each region is admitted to some tokens, and none to all of them."""
    weights = {
        "open": {"mlp": 0.0, "block": 1.0, "rest": 0.0},
        "doubtful": {"mlp": 1.0, "block": 0.0, "rest": 0.0},
        "personal": {"mlp": 1.0, "block": 0.0, "rest": 0.0},
    }
    step([GradientRouting(cuts=(GradientMask(classes="open", module="blocks.1"),))], source(documents()), weights)
    with pytest.raises(PlanError, match="doubtful, open, personal can teach nothing at all"):
        step([GradientRouting(cuts=(GradientMask(classes="**", module="blocks.1"),))], source(documents()), weights)


def test_cuts_of_some_units_by_token() -> None:
    """The same masks, given by hand, do the same; of half of the units they don't."""
    data = source(documents())
    cuts = tuple(GradientMask(classes=c, module=path) for c, paths in CUT.items() for path in paths)
    (_, _, found), (_, _, same) = step([GradientRouting()], data), step([GradientRouting(cuts=cuts)], data)
    assert all(map(torch.equal, found.state_dict().values(), same.state_dict().values()))
    half = tuple(GradientMask(classes=c.classes, module=c.module, units=(0, 4)) for c in cuts)
    _, _, other = step([GradientRouting(cuts=half)], data)
    assert not torch.allclose(found.embedding.weight, other.embedding.weight, rtol=1e-9)


class WithMean(GPT):
    """Gives a number beside the logits, in which no tokens are told apart."""

    def forward(self, *given: Any) -> Any:
        logits = super().forward(*given)
        return logits.mean(), logits


def second(network: Any, data: Any) -> Any:
    return exact(lambda *given: network(*given)[1], data)  # type: ignore[arg-type]


def test_tokens_of_a_rejected_class_ask_for_no_mask() -> None:
    """They're left out before the forward pass; the whole model would have to be cut for them."""
    text = policy({name: row for name, row in WEIGHTS.items() if name != "personal"}, REGIONS)
    network = model().double()
    network.__class__ = WithMean
    run = trainer(network, source(documents()), text, methods=[GradientRouting()], loss=second)
    assert run.fit().outcome == "completed"


def test_packs_of_one_kind_are_run_with_the_forget_region_or_without() -> None:
    """Padding reads nothing, and is of neither kind."""
    data = source(documents())
    assert any((batch.lineage.token_class_ids < 0).any() for batch in first_step(data))
    (_, _, found), (_, _, plain) = step([SelectiveGradientMasking(forget="rest")], data), step([], data)
    assert all(map(torch.equal, found.state_dict().values(), plain.state_dict().values()))
    kept = {name: {**row, "block": 0.0} for name, row in WEIGHTS.items()}
    (_, _, found), (_, _, plain) = step([SelectiveGradientMasking(forget="block")], data, kept), step([], data, kept)
    assert torch.equal(found.blocks[1].attention.key.weight, plain.blocks[1].attention.key.weight)
    assert not torch.equal(found.head.weight, plain.head.weight)
