"""SGTM against a backward pass by hand, row by row in float64; what it keeps apart, over steps, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.plan import Promise
from cosmati.errors import PlanError
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.policy_file import load_policy
from cosmati.routing.selective_masking import SelectiveGradientMasking, ablate_region
from tests.train.strategies.samples import (
    REGIONS,
    Array,
    Net,
    by_hand,
    gradients,
    mean_by_hand,
    microbatches,
    policy,
    region_of,
    trainer,
)

KEPT = {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 1.0}
GONE = {"stem": 0.0, "side": 0.0, "forget": 1.0, "head": 0.0}
WEIGHTS = {"kept": KEPT, "gone": GONE, "both": dict.fromkeys(REGIONS, 1.0)}
APART = {**WEIGHTS, "both": KEPT}
"""No class is unlabelled."""
MASKING = SelectiveGradientMasking(forget="forget")


def zeroed(p: Any) -> dict[str, Array]:
    return {name: value * (region_of(name) != "forget") for name, value in p.items()}


def test_the_three_kinds_of_data() -> None:
    network = Net()

    def alone(p: Any, row: Array, target: int, class_name: str) -> dict[str, Array]:
        return by_hand(zeroed(p) if class_name == "kept" else p, row, target)

    expected = mean_by_hand(network, microbatches(), WEIGHTS, alone)
    found = gradients(network, WEIGHTS, MASKING)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)


def test_without_it_kept_rows_read_the_region() -> None:
    """The control: the policy's routes are the mask on gradients alone."""
    network = Net()
    expected = mean_by_hand(network, microbatches(), WEIGHTS, lambda p, row, target, _: by_hand(p, row, target))
    found = gradients(network, WEIGHTS)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)
    assert not np.allclose(found["head.weight"], gradients(Net(), WEIGHTS, MASKING)["head.weight"])


def trained(weights: Any, *methods: Any, optimizers: Any, swapped: str = "") -> tuple[Any, dict[str, Tensor]]:
    network = Net()
    run = trainer(network, weights, *methods, optimizers=optimizers)
    with run:
        for step in range(4):
            batches = microbatches(seed=step, swapped=swapped)
            run.step_microbatches(batches, [batch.class_id for batch in batches])
    return network, {name: p.detach().clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    "optimizers",
    [
        lambda: [AdamW(lr=0.01, weight_decay=0.1)],
        lambda: [SGD(lr=0.1, momentum=0.9)],
        lambda: [Muon(lr=0.02), AdamW(lr=0.01)],
    ],
)
def test_what_is_kept_never_follows_from_what_is_gone(optimizers: Any) -> None:
    """Over four steps, every bit: where all data are labelled, removable rows reach their own region alone."""
    (network, one), (_, other) = (
        trained(APART, MASKING, optimizers=optimizers(), swapped=swapped) for swapped in ("", "gone")
    )
    assert {region_of(name) for name in one if not torch.equal(one[name], other[name])} == {"forget"}
    names = ablate_region(network, policy(APART), "forget")
    assert {region_of(name) for name in names} == {"forget"}
    assert all(bool((dict(network.named_parameters())[name] == 0).all()) for name in names)
    rows = microbatches()[0].input
    hidden = torch.tanh(network.stem(rows))
    torch.testing.assert_close(network(rows), network.head(hidden + network.side(hidden)), rtol=0, atol=0)


@pytest.mark.parametrize("weights", [APART, WEIGHTS])
def test_without_the_mask_on_parameters_or_with_unlabelled_data_it_spreads(weights: Any) -> None:
    """The controls: the promise above is made by both masks, and an unlabelled class carries content on."""
    methods = [] if weights is APART else [MASKING]
    (_, one), (_, other) = (
        trained(weights, *methods, optimizers=[SGD(lr=0.1)], swapped=swapped) for swapped in ("", "gone")
    )
    assert {region_of(name) for name in one if not torch.equal(one[name], other[name])} == set(REGIONS)


def test_parameters_are_put_back_whatever_happens() -> None:
    network = Net()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}

    class FallsError(Exception):
        pass

    def falling(model: Any, data: Any) -> Any:
        value = model(data[0])
        assert bool((network.extra.up.weight == 0).all())
        raise FallsError(value)

    with trainer(network, WEIGHTS, MASKING, loss=falling) as run, pytest.raises(FallsError):
        run.step_microbatches([microbatches()[2]] * 8, [2] * 8)
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())


def test_the_plan_says_what_it_does_and_keeps_its_promises() -> None:
    plan = trainer(Net(), WEIGHTS, MASKING).plan
    assert "classes that may not teach forget are run with its parameters at zero" in str(plan)
    for pair in (("kept", "forget"), ("gone", "stem"), ("gone", "side"), ("gone", "head")):
        assert plan.holds(Promise.NO_DIRECT_WRITE, pair)


def test_what_divides_by_the_region_is_refused_by_name() -> None:
    network = Net()
    network.extra.down = nn.utils.parametrizations.weight_norm(network.extra.down)
    with pytest.raises(PlanError, match=r"With the parameters of forget at zero the loss is nan"):
        gradients(network, WEIGHTS, MASKING)
    assert all(bool(p.any()) for p in network.parameters())


def test_unknown_regions_are_refused() -> None:
    with pytest.raises(PlanError, match="'extra' is no region of the policy, which has stem, side, head, forget"):
        gradients(Net(), WEIGHTS, SelectiveGradientMasking(forget="extra"))
    with pytest.raises(PlanError, match="no region 'extra' to take away"):
        ablate_region(Net(), policy(WEIGHTS), "extra")


def test_with_gradient_routing_both_act() -> None:
    """Kept rows read zeros where nothing flows back anyway; rows to be removable are cut at what they may not teach."""
    weights = {**APART, "gone": {**GONE, "stem": 1.0}}
    network = Net()

    def alone(p: Any, row: Array, target: int, class_name: str) -> dict[str, Array]:
        if class_name == "gone":
            return by_hand(p, row, target) | stem_by_the_extra_branch(p, row, target)
        return by_hand(zeroed(p), row, target)

    expected = mean_by_hand(network, microbatches(), weights, alone)
    for name, value in gradients(network, weights, MASKING, GradientRouting()).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-13, err_msg=name)


def stem_by_the_extra_branch(p: Any, row: Array, target: int) -> dict[str, Array]:
    """Return the stem's gradient where the extra branch alone hands anything on: head and side are cut."""
    h1 = np.tanh(p["stem.weight"] @ row + p["stem.bias"])
    inner = np.tanh(p["side.up.weight"] @ h1 + p["side.up.bias"])
    h2 = h1 + p["side.down.weight"] @ inner + p["side.down.bias"]
    hidden = np.tanh(p["extra.up.weight"] @ h2 + p["extra.up.bias"])
    logits = p["head.weight"] @ h2 + p["head.bias"] + p["extra.down.weight"] @ hidden + p["extra.down.bias"]
    out = np.exp(logits) / np.exp(logits).sum()
    out[target] -= 1
    flow = p["extra.up.weight"].T @ ((p["extra.down.weight"].T @ out) * (1 - hidden**2)) * (1 - h1**2)
    return {"stem.weight": np.outer(flow, row), "stem.bias": flow}


def test_a_range_of_blocks_is_taken_away() -> None:
    """The regions of a schedule of depth are regions."""
    text = "{container: blocks, ranges: [0-0, 1-], open: [{phase: main, blocks: [0-0, 1-]}]}"
    by_depth = load_policy(f"version: 1\ntaxonomy: t\ndepth: {text}\nrules: [{{class: '**', weight: 1}}]")
    model = GPT(GPTConfig(vocabulary_size=11, sequence_length=4, width=8, num_blocks=2, num_heads=2))
    assert {name.split(".")[1] for name in ablate_region(model, by_depth, "blocks.1-")} == {"1"}
