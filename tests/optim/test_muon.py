"""Muon against the singular value decomposition in float64, and torch's own Muon."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

from cosmati.errors import PlanError
from cosmati.optim import optimizers
from cosmati.optim.muon import OrthogonalizedMomentum, orthogonalize

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quintic(matrix: Tensor, num_iterations: int) -> Tensor:
    """Apply the polynomial to the singular values alone, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for _ in range(num_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.long
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 6), st.integers(0, 99))
def test_follows_the_polynomial_of_the_singular_values(rows: int, columns: int, iterations: int, seed: int) -> None:
    matrix = random(rows, columns, seed=seed)
    ours = orthogonalize(matrix[None], iterations)[0]
    torch.testing.assert_close(ours.double(), quintic(matrix, iterations), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_singular_values_come_close_to_one_along_the_same_vectors(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    ours = orthogonalize(matrix[None])[0].double()
    # The square matrix has a smallest singular value near 0, which five iterations don't bring up.
    values = torch.linalg.svdvals(ours)
    assert float(values.max()) < 1.25
    assert float(values.median()) > 0.6
    polar = u @ v
    cosine = (ours * polar).sum() / (ours.norm() * polar.norm())
    assert float(cosine) > 0.95


@pytest.mark.long
def test_keeps_zero_batch_and_type() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    batch = random(5, 6, 9)
    one_by_one = torch.cat([orthogonalize(matrix[None]) for matrix in batch])
    torch.testing.assert_close(orthogonalize(batch), one_by_one)
    assert orthogonalize(batch.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(orthogonalize(batch.double()).float(), one_by_one, atol=1e-4, rtol=1e-3)


def trained(kind: type[torch.optim.Optimizer], steps: int, **options: Any) -> list[Tensor]:
    shapes = [(12, 8), (8, 12), (10, 10)]
    parameters = [Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = kind(parameters, lr=0.02, **options)
    for step in range(steps):
        for i, parameter in enumerate(parameters):
            parameter.grad = random(*parameter.shape, seed=100 * step + i)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.long
@pytest.mark.parametrize(("scale", "theirs"), [("aspect", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_agrees_with_torch(scale: str, theirs: str, nesterov: bool) -> None:
    """torch iterates in bfloat16, so the agreement is that of bfloat16."""
    common: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    ours = trained(OrthogonalizedMomentum, 4, scale=scale, **common)
    reference = trained(torch.optim.Muon, 4, adjust_lr_fn=theirs, **common)
    start = trained(OrthogonalizedMomentum, 0)
    for a, b, before in zip(ours, reference, start, strict=True):
        assert float((a - b).norm() / (b - before).norm()) < 0.02


def test_one_step_by_hand() -> None:
    weight, gradient = random(6, 3), random(6, 3, seed=1)
    parameter = Parameter(weight.clone())
    parameter.grad = gradient
    OrthogonalizedMomentum([parameter], lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.5).step()
    average = 0.2 * gradient.double()
    ahead = 0.2 * gradient.double() + 0.8 * average
    expected = weight.double() * (1 - 0.1 * 0.5) - 0.1 * math.sqrt(2) * quintic(ahead, 5)
    torch.testing.assert_close(parameter.detach().double(), expected, atol=1e-5, rtol=1e-4)


def test_convolution_is_its_flattened_matrix() -> None:
    kernel, matrix = Parameter(random(8, 3, 3, 3)), Parameter(random(8, 3, 3, 3).flatten(1))
    channels_last = Parameter(random(8, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    for parameter in (kernel, matrix, channels_last):
        parameter.grad = random(8, 3, 3, 3, seed=1).view_as(parameter)
    for parameter in (kernel, matrix, channels_last):
        OrthogonalizedMomentum([parameter], lr=0.1).step()
    assert torch.equal(kernel.detach().flatten(1), matrix.detach())
    assert torch.equal(channels_last.detach(), kernel.detach())


def test_none_is_skipped_whole() -> None:
    first, second = Parameter(random(4, 4)), Parameter(random(4, 4, seed=1))
    optimizer = OrthogonalizedMomentum([first, second], lr=0.1, weight_decay=0.5)
    first.grad, second.grad = random(4, 4, seed=2), random(4, 4, seed=3)
    optimizer.step()
    kept = second.detach().clone(), optimizer.state[second]["momentum_buffer"].clone()
    second.grad = None
    before = first.detach().clone()
    optimizer.step()
    assert torch.equal(second, kept[0])
    assert torch.equal(optimizer.state[second]["momentum_buffer"], kept[1])
    assert not torch.equal(first, before)


def test_bits_do_not_depend_on_who_else_has_a_gradient() -> None:
    def step(present: list[bool]) -> Tensor:
        parameters = [Parameter(random(16, 24, seed=i)) for i in range(3)]
        optimizer = OrthogonalizedMomentum(parameters, lr=0.1)
        for i, parameter in enumerate(parameters):
            parameter.grad = random(16, 24, seed=10 + i) if present[i] else None
        optimizer.step()
        return parameters[0].detach()

    assert torch.equal(step([True, False, False]), step([True, True, True]))


@pytest.mark.gpu
def test_on_an_accelerator_a_batch_has_one_shape() -> None:
    def step(present: list[bool]) -> Tensor:
        parameters = [Parameter(random(64, 96, seed=i).cuda()) for i in range(4)]
        optimizer = OrthogonalizedMomentum(parameters, lr=1.0)
        for i, parameter in enumerate(parameters):
            parameter.grad = random(64, 96, seed=10 + i).cuda() if present[i] else None
        optimizer.step()
        return parameters[0].detach().cpu()

    alone, together = step([True, False, False, False]), step([True] * 4)
    assert torch.equal(alone, together)
    direction = random(64, 96, seed=10)
    expected = random(64, 96) - quintic(direction, 5).float()
    # bfloat16 has 8 bits of precision.
    assert float((alone - expected).norm() / (expected - random(64, 96)).norm()) < 0.02


def test_resumes_with_the_same_bits() -> None:
    def steps(parameter: Parameter, optimizer: OrthogonalizedMomentum, which: range) -> None:
        for step in which:
            parameter.grad = random(5, 7, seed=step)
            optimizer.step()

    whole = Parameter(random(5, 7))
    steps(whole, OrthogonalizedMomentum([whole], lr=0.1), range(6))
    half = Parameter(random(5, 7))
    stopped = OrthogonalizedMomentum([half], lr=0.1)
    steps(half, stopped, range(3))
    resumed = Parameter(half.detach().clone())
    again = OrthogonalizedMomentum([resumed], lr=0.1)
    again.load_state_dict(stopped.state_dict())
    steps(resumed, again, range(3, 6))
    assert torch.equal(resumed, whole)


def test_closure_gives_the_loss() -> None:
    parameter = Parameter(torch.eye(3))

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert OrthogonalizedMomentum([parameter], lr=0.1).step(closure) == 3.0
    assert parameter.grad is not None


def test_configuration_builds_it() -> None:
    parameter = Parameter(random(4, 6))
    built = optimizers.Muon(
        lr=0.3, momentum=0.7, nesterov=False, weight_decay=0.1, num_iterations=3, scale="rms", bfloat16=True
    ).build([("weight", parameter)])
    group = {key: value for key, value in built.param_groups[0].items() if key != "params"}
    assert group == {
        "lr": 0.3,
        "momentum": 0.7,
        "nesterov": False,
        "weight_decay": 0.1,
        "num_iterations": 3,
        "scale": "rms",
        "bfloat16": True,
    }


def test_bfloat16_takes_matrices_of_a_shape_together() -> None:
    """Each matrix moves as it does alone in float32, to bfloat16's accuracy; one without a gradient stays."""

    def stepped(*, bfloat16: bool) -> list[Tensor]:
        parameters = [Parameter(random(*shape, seed=i)) for i, shape in enumerate([(6, 4), (6, 4), (3, 5), (6, 4)])]
        for i, parameter in enumerate(parameters[:3]):
            parameter.grad = random(*parameter.shape, seed=10 + i)
        OrthogonalizedMomentum(parameters, lr=1.0, bfloat16=bfloat16).step()
        return [parameter.detach() for parameter in parameters]

    together, alone = stepped(bfloat16=True), stepped(bfloat16=False)
    for mine, theirs in zip(together[:3], alone[:3], strict=True):
        assert not torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0)
    assert torch.equal(together[3], random(6, 4, seed=3))


def test_bfloat16_of_a_checkpoint_from_before_is_off() -> None:
    parameter = Parameter(random(4, 6))
    optimizer = OrthogonalizedMomentum([parameter], lr=0.1)
    state = optimizer.state_dict()
    del state["param_groups"][0]["bfloat16"]
    optimizer.load_state_dict(state)
    other = Parameter(random(4, 6))
    fresh = OrthogonalizedMomentum([other], lr=0.1)
    for each, own in ((parameter, optimizer), (other, fresh)):
        each.grad = random(4, 6, seed=7)
        own.step()
    assert torch.equal(parameter, other)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"num_iterations": 0}, {"scale": "none"}],
)
def test_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="Muon can't use"):
        OrthogonalizedMomentum([Parameter(torch.eye(2))], **{"lr": 0.1, **options})


def test_refuses_vectors() -> None:
    with pytest.raises(PlanError, match="less than two dimensions"):
        OrthogonalizedMomentum([Parameter(torch.ones(3))], lr=0.1)


@pytest.mark.parametrize("shape", [(64, 4), (4, 64), (8, 8)])
def test_what_is_multiplied_is_the_small_side_of_a_matrix(shape: tuple[int, int]) -> None:
    """Five iterations of three products: small x long x small, small^3, small x small x long."""
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        found = orthogonalize(matrices)
    small, long = min(shape), max(shape)
    assert counter.get_total_flops() == 3 * 5 * 2 * (2 * small * small * long + small**3)
    assert small == long or torch.equal(found, orthogonalize(matrices.mT).mT)


@pytest.mark.parametrize("shape", [(64, 4), (4, 64), (5, 5)])
def test_a_rank_is_given_work_by_what_its_products_cost(shape: tuple[int, int]) -> None:
    """In proportion to the operations of the larger two products: each the matrix, times the small side."""
    costs = []
    for own in (shape, (2 * shape[0], 2 * shape[1])):
        parameter = Parameter(random(*own))
        optimizer = OrthogonalizedMomentum([parameter], lr=0.1)
        costs.append(optimizer._job([parameter, parameter], {}, optimizer.param_groups[0]).cost)
        assert costs[-1] == 2 * own[0] * own[1] * min(own)
    assert costs[1] == 8 * costs[0]
