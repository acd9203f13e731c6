"""SOAP against the paper's algorithm in NumPy, its relation to Adam, and its state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from cosmati.core.state import optimizer_tensors, restore_optimizer
from cosmati.errors import PlanError
from cosmati.optim.soap import SOAP, EigenbasisAdam

torch.set_num_threads(1)
Array = NDArray[np.float64]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drive(parameter: Parameter, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    for step in steps:
        parameter.grad = random(*parameter.shape, seed=100 + step).to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def by_the_paper(
    weight: Array, gradients: list[Array], lr: float, betas: tuple[float, float], decay: float, frequency: int
) -> Array:
    """Algorithm 3, both sides, decay of the Gram matrices as that of the squared gradient."""
    first, second = betas
    momentum, squares = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients):
        if t == 0:
            left, right = (1 - second) * g @ g.T, (1 - second) * g.T @ g
            u, v = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
            continue
        momentum = first * momentum + (1 - first) * g
        squares = second * squares + (1 - second) * (u.T @ g @ v) ** 2
        adam = (u.T @ momentum @ v) / (1 - first**t) / (np.sqrt(squares / (1 - second**t)) + 1e-8)
        weight = weight - lr * decay * weight - lr * (u @ adam @ v.T)
        left = second * left + (1 - second) * g @ g.T
        right = second * right + (1 - second) * g.T @ g
        if t % frequency == 0:
            u, v = np.linalg.qr(left @ u)[0], np.linalg.qr(right @ v)[0]
    return weight


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([(4, 3), (3, 4), (5, 5), (2, 3)]),
    st.floats(0.1, 0.95),
    st.floats(0.1, 0.95),
    st.floats(0, 0.1),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_against_the_papers_algorithm(
    shape: tuple[int, int], first: float, second: float, decay: float, frequency: int, steps: int
) -> None:
    parameter = Parameter(random(*shape).double())
    options: dict[str, Any] = {"weight_decay": decay, "precondition_frequency": frequency}
    ours = drive(parameter, EigenbasisAdam([parameter], 0.1, (first, second), **options), range(steps))
    gradients = [random(*shape, seed=100 + step).double().numpy() for step in range(steps)]
    expected = by_the_paper(random(*shape).double().numpy(), gradients, 0.1, (first, second), decay, frequency)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("shape", "longest"), [((7,), 100), ((6, 5), 1), ((1,), 9), ((), 9)])
def test_without_bases_it_is_adamw(shape: tuple[int, ...], longest: int) -> None:
    ours, theirs = Parameter(random(*shape)), Parameter(random(*shape))
    mine = EigenbasisAdam([ours], 0.1, (0.9, 0.95), weight_decay=0.1, max_precondition_dim=longest)
    reference = torch.optim.AdamW([theirs], 0.1, (0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(drive(ours, mine, range(5)), drive(theirs, reference, range(5)))


def test_turned_coordinates_give_the_turned_step() -> None:
    """What Adam lacks: the step doesn't depend on the basis that the weights are written in."""
    turn_rows, turn_columns = (torch.linalg.qr(random(n, n, seed=n).double()).Q for n in (5, 4))

    def end(*, turned: bool) -> Tensor:
        start = random(5, 4).double()
        parameter = Parameter(turn_rows @ start @ turn_columns if turned else start)
        optimizer = EigenbasisAdam([parameter], 0.1, precondition_frequency=2)
        for step in range(6):
            gradient = random(5, 4, seed=100 + step).double()
            parameter.grad = turn_rows @ gradient @ turn_columns if turned else gradient
            optimizer.step()
        return parameter.detach()

    torch.testing.assert_close(end(turned=True), turn_rows @ end(turned=False) @ turn_columns, atol=1e-6, rtol=1e-6)


def test_bases_stay_orthogonal_and_the_first_step_rests() -> None:
    parameter = Parameter(random(8, 6))
    optimizer = EigenbasisAdam([parameter], 0.1, precondition_frequency=1)
    assert torch.equal(drive(parameter, optimizer, range(1)), random(8, 6))
    drive(parameter, optimizer, range(1, 12))
    state = optimizer.state[parameter]
    for side, size in (("rows", 8), ("columns", 6)):
        basis = state[f"basis_{side}"]
        torch.testing.assert_close(basis @ basis.mT, torch.eye(size), atol=1e-5, rtol=0)
    assert all(isinstance(value, Tensor) for value in state.values())


def test_convolution_is_its_flattened_matrix() -> None:
    kernel, matrix = Parameter(random(8, 3, 3, 3)), Parameter(random(8, 3, 3, 3).flatten(1))
    optimizer, flat = EigenbasisAdam([kernel], 0.1), EigenbasisAdam([matrix], 0.1)
    for step in range(4):
        kernel.grad = random(8, 3, 3, 3, seed=step)
        matrix.grad = kernel.grad.flatten(1)
        optimizer.step()
        flat.step()
    assert torch.equal(kernel.detach().flatten(1), matrix.detach())


def test_rate_zero_and_absent_gradients_move_nothing() -> None:
    first, second = Parameter(random(4, 4)), Parameter(random(4, 4, seed=1))
    optimizer = EigenbasisAdam([first, second], 0.0, weight_decay=0.5)
    for step in range(3):
        first.grad = random(4, 4, seed=step)
        optimizer.step()
    assert torch.equal(first.detach(), random(4, 4))
    assert torch.equal(second.detach(), random(4, 4, seed=1))
    assert not optimizer.state[second]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resumes_with_the_same_bits(stop: int) -> None:
    whole, half = Parameter(random(5, 7)), Parameter(random(5, 7))
    drive(whole, EigenbasisAdam([whole], 0.1, precondition_frequency=2), range(6))
    stopped = EigenbasisAdam([half], 0.1, precondition_frequency=2)
    drive(half, stopped, range(stop))
    tensors, facts = optimizer_tensors(stopped, {id(half): "weight"})
    resumed = Parameter(half.detach().clone())
    again = EigenbasisAdam([resumed], 0.1, precondition_frequency=2)
    restore_optimizer(again, {id(resumed): "weight"}, tensors, facts)
    assert torch.equal(drive(resumed, again, range(stop, 6)), whole.detach())


def test_low_precision_weights_have_wide_state() -> None:
    parameter = Parameter(random(6, 4).bfloat16())
    optimizer = EigenbasisAdam([parameter], 0.1)
    moved = drive(parameter, optimizer, range(4))
    assert moved.dtype is torch.bfloat16
    assert bool(moved.isfinite().all())
    assert {value.dtype for value in optimizer.state[parameter].values()} == {torch.float32}


def test_configuration_builds_it() -> None:
    named = [("weight", Parameter(random(4, 6))), ("bias", Parameter(random(4)))]
    built = SOAP(lr=0.3, betas=(0.8, 0.9), weight_decay=0.1, decay_vectors=False, precondition_frequency=3).build(named)
    assert [group["weight_decay"] for group in built.param_groups] == [0.1, 0.0]
    group = built.param_groups[1]
    assert (group["lr"], group["betas"], group["gram_beta"], group["precondition_frequency"]) == (
        0.3,
        (0.8, 0.9),
        0.9,
        3,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"gram_beta": 1.0},
        {"eps": 0.0},
        {"weight_decay": -1},
        {"precondition_frequency": 0},
    ],
)
def test_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"SOAP can't use .* Use"):
        EigenbasisAdam([Parameter(torch.eye(2))], **{"lr": 0.1, **options})
    with pytest.raises(PlanError, match="SOAP"):
        SOAP(**{"lr": 0.1, **options})
