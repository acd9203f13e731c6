"""Lion against the paper's loop in float64, and the laws of its step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim.lion import Lion, SignMomentum

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drive(parameter: Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        parameter.grad = random(*parameter.shape, seed=100 + step).to(parameter.dtype)
        optimizer.step()


@settings(deadline=None, max_examples=20)
@given(st.floats(0, 0.99), st.floats(0, 0.99), st.floats(0, 0.5), st.floats(0, 0.1), st.integers(1, 6))
def test_against_the_papers_loop(first: float, second: float, lr: float, decay: float, steps: int) -> None:
    parameter = Parameter(random(4, 3).double())
    drive(parameter, SignMomentum([parameter], lr, (first, second), decay), range(steps))
    weight, momentum = random(4, 3).double().numpy(), np.zeros((4, 3))
    for step in range(steps):
        gradient = random(4, 3, seed=100 + step).double().numpy()
        update = np.sign(first * momentum + (1 - first) * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = second * momentum + (1 - second) * gradient
    np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=1e-12)


def test_every_weight_moves_by_the_rate_and_zero_gradients_stay() -> None:
    parameter = Parameter(random(5, 5))
    before = parameter.detach().clone()
    parameter.grad = random(5, 5, seed=1)
    parameter.grad[0] = 0
    SignMomentum([parameter], 0.25).step()
    moved = (parameter.detach() - before).abs()
    assert torch.equal(moved[0], torch.zeros(5))
    torch.testing.assert_close(moved[1:], torch.full((4, 5), 0.25))


def test_rate_zero_moves_nothing() -> None:
    parameter = Parameter(random(3))
    drive(parameter, SignMomentum([parameter], 0.0, weight_decay=0.5), range(3))
    assert torch.equal(parameter.detach(), random(3))


def test_none_is_skipped_whole() -> None:
    first, second = Parameter(random(4)), Parameter(random(4, seed=1))
    optimizer = SignMomentum([first, second], 0.1, weight_decay=0.5)
    first.grad, second.grad = random(4, seed=2), random(4, seed=3)
    optimizer.step()
    kept = second.detach().clone(), optimizer.state[second]["momentum_buffer"].clone()
    second.grad = None
    optimizer.step()
    assert torch.equal(second, kept[0])
    assert torch.equal(optimizer.state[second]["momentum_buffer"], kept[1])


def test_resumes_with_the_same_bits() -> None:
    whole, half = Parameter(random(5, 7)), Parameter(random(5, 7))
    drive(whole, SignMomentum([whole], 0.01), range(6))
    stopped = SignMomentum([half], 0.01)
    drive(half, stopped, range(3))
    resumed = Parameter(half.detach().clone())
    again = SignMomentum([resumed], 0.01)
    again.load_state_dict(stopped.state_dict())
    drive(resumed, again, range(3, 6))
    assert torch.equal(resumed, whole)


def test_closure_gives_the_loss() -> None:
    parameter = Parameter(torch.eye(3))

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert SignMomentum([parameter], lr=0.1).step(closure) == 3.0
    torch.testing.assert_close(parameter.detach(), 0.9 * torch.eye(3))


def test_configuration_builds_it() -> None:
    named = [("weight", Parameter(random(4, 6))), ("bias", Parameter(random(4)))]
    built = Lion(lr=0.3, betas=(0.8, 0.9), weight_decay=0.1, decay_vectors=False).build(named)
    assert [group["weight_decay"] for group in built.param_groups] == [0.1, 0.0]
    assert all(group["lr"] == 0.3 and group["betas"] == (0.8, 0.9) for group in built.param_groups)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1}])
def test_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"Lion can't use .* Use betas in \[0, 1\)"):
        SignMomentum([Parameter(torch.eye(2))], **{"lr": 0.1, **options})
    with pytest.raises(PlanError, match="Lion"):
        Lion(**{"lr": 0.1, **options})
