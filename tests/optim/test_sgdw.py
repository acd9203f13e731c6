"""SGDW against its formula in float64: a decay that follows the schedule, and no learning rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter

from cosmati import InMemory, Regression, RunConfig, Trainer
from cosmati.errors import PlanError
from cosmati.optim import SGD, SGDW, AdamW, Cosine, Optimizer
from cosmati.optim.sgdw import DecoupledMomentum

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.long
@settings(deadline=None, max_examples=25)
@given(
    st.floats(0.01, 0.5), st.sampled_from([0.0, 0.9]), st.booleans(), st.floats(0, 0.2),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
)  # fmt: skip
def test_against_the_formula(lr: float, momentum: float, nesterov: bool, decay: float, curve: list[float]) -> None:
    parameter = Parameter(random(4, 3))
    optimizer = DecoupledMomentum([parameter], lr, momentum, nesterov, decay)
    weight, buffer = random(4, 3).numpy(), np.zeros((4, 3))
    for step, multiplier in enumerate(curve):
        gradient = random(4, 3, seed=100 + step)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr * multiplier
        optimizer.step()
        buffer = momentum * buffer + gradient.numpy()
        direction = gradient.numpy() + momentum * buffer if nesterov and momentum else buffer
        # 1711.05101, algorithm 1: theta <- theta - eta (alpha m + lambda theta)
        weight = weight - multiplier * (lr * direction + decay * weight)
        assert torch.equal(parameter.grad, gradient)
    np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=1e-12)


def test_without_decay_it_is_pytorchs() -> None:
    ours, theirs = Parameter(random(4, 3)), Parameter(random(4, 3))
    pair = DecoupledMomentum([ours], 0.1, 0.9, nesterov=True), torch.optim.SGD([theirs], 0.1, 0.9, nesterov=True)
    for step in range(5):
        ours.grad, theirs.grad = (random(4, 3, seed=step) for _ in range(2))
        for optimizer in pair:
            optimizer.step()
    assert torch.equal(ours, theirs)


def decayed(optimizer: Optimizer) -> float:
    """Train four steps without any gradient; return what is left of a weight of 1."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    rows = (torch.zeros(4, 2), torch.zeros(4, 1))
    config = RunConfig(budget="4ba")
    Trainer(model, Regression(), InMemory(rows, 4), optimizers=optimizer, config=config).fit()
    return float(model.weight.detach()[0, 0])


def test_the_schedule_multiplies_the_decay_and_the_rate_does_not() -> None:
    schedule = Cosine()
    left = np.prod([1 - 0.1 * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)])
    for lr in (1e-3, 0.5):
        assert decayed(SGDW(lr=lr, weight_decay=0.1, schedule=schedule)) == pytest.approx(left, rel=1e-6)
        assert decayed(AdamW(lr=lr, weight_decay=0.1 / lr, schedule=schedule)) == pytest.approx(left, rel=1e-5)
    assert decayed(SGD(lr=1e-3, weight_decay=0.1, schedule=schedule)) > 0.999


@pytest.mark.parametrize(
    "options", [{"lr": -0.1}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": 1.0}, {"weight_decay": -1e-4}]
)
def test_refuses_options(options: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"SGDW can't use .* share of a weight|a learning rate is a number >= 0"):
        SGDW(**{"lr": 0.1, **options})
    with pytest.raises(PlanError, match="SGDW can't use"):
        DecoupledMomentum([Parameter(torch.ones(2))], **{"lr": 0.1, **options})  # type: ignore[arg-type]


def test_each_option_is_told_by_its_name() -> None:
    for make in (SGDW, lambda **options: DecoupledMomentum([Parameter(torch.ones(2))], **options)):
        with pytest.raises(PlanError, match=r"lr=0\.5, momentum=2\.0, weight_decay=0\.25\. Use"):
            make(lr=0.5, momentum=2.0, weight_decay=0.25)


def test_a_rate_of_zero_still_decays_and_vectors_are_left_out_where_asked() -> None:
    parameter = Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    DecoupledMomentum([parameter], 0.0, weight_decay=0.25).step()
    assert torch.equal(parameter.detach(), torch.full((2,), 0.75))
    layer = nn.Linear(2, 2)
    built = SGDW(lr=0.1, weight_decay=0.1, decay_vectors=False).build(list(layer.named_parameters()))
    assert [(len(group["params"]), group["weight_decay"]) for group in built.param_groups] == [(1, 0.1), (1, 0.0)]
