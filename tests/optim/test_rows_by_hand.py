"""NorMuon's rows divided by their own lengths, and Aurora's made even, against loops over single rows in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import Aurora, NorMuon, matrices
from cosmati.optim.aurora import EvenRowMuon, orthogonalize_evenly
from cosmati.optim.muon import orthogonalize
from cosmati.optim.normuon import RowNormalizedMuon

DOUBLE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def polar(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(num_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(4, 2), (2, 3), (2, 3, 2)])
def test_normuon_divides_each_row_by_the_root_of_its_average(shape: tuple[int, ...]) -> None:
    start = drawn(*shape)
    parameter = Parameter(start.clone())
    optimizer = RowNormalizedMuon(
        [parameter], 0.5, 0.75, 0.25, 0.125, nesterov=False, weight_decay=0.5, num_iterations=3
    )
    x, m, moments = start.flatten(1), torch.zeros_like(start).flatten(1), [0.0] * shape[0]
    for number in range(3):
        gradient = drawn(*shape, seed=number + 1)
        parameter.grad = gradient.clone()
        optimizer.step()
        m = 0.75 * m + 0.25 * gradient.flatten(1)
        rows = []
        for i, row in enumerate(polar(m, 3)):
            moments[i] = 0.25 * moments[i] + 0.75 * sum(value**2 for value in row.tolist()) / len(row)
            rows.append(row / (math.sqrt(moments[i]) + 0.125))
        update = torch.stack(rows)
        # As long as numbers of 0.2 each would be.
        x = x - 0.5 * 0.5 * x - 0.5 * 0.2 * math.sqrt(update.numel()) * update / update.norm()
        torch.testing.assert_close(parameter.detach().flatten(1), x, rtol=1e-9, atol=1e-11)
        moment = optimizer.state[parameter]["row_moment"]
        assert moment.shape == (shape[0], 1)
        assert moment.flatten().tolist() == pytest.approx(moments, rel=1e-9)
    assert optimizer.state[parameter].keys() == {"momentum_buffer", "row_moment"}


def test_a_matrix_of_zeros_stays_where_it_is() -> None:
    for kind in (RowNormalizedMuon, EvenRowMuon):
        parameter = Parameter(drawn(3, 2))
        parameter.grad = torch.zeros(3, 2, dtype=DOUBLE)
        kind([parameter], 0.5, weight_decay=0.0).step()
        assert torch.equal(parameter.detach(), drawn(3, 2))


def even(matrix: Tensor, num_iterations: int, num_rounds: int, damping: float) -> Tensor:
    """Algorithm 1 of 2606.27715, row by row."""
    rows, columns = matrix.shape
    if rows <= columns:
        return polar(matrix, num_iterations)
    scales = [1 / max(float(row.norm()), 1e-7) for row in matrix]
    found = polar(torch.diag(torch.tensor(scales, dtype=DOUBLE)) @ matrix, num_iterations)
    for _ in range(num_rounds - 1):
        squares = [max(float(row.square().sum()), 1e-14) for row in found]
        scales = [scale * (columns / rows / square) ** damping for scale, square in zip(scales, squares, strict=True)]
        found = polar(torch.diag(torch.tensor(scales, dtype=DOUBLE)) @ matrix, num_iterations)
    return found


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (3, 3)])
@pytest.mark.parametrize(("num_iterations", "num_rounds", "damping"), [(5, 1, 0.5), (3, 2, 1.0), (4, 4, 0.25)])
def test_rows_of_tall_matrices_are_evened_in_each_round(
    shape: tuple[int, int], num_iterations: int, num_rounds: int, damping: float
) -> None:
    stack = torch.stack([drawn(*shape), 1e3 * drawn(*shape, seed=1)])
    found = orthogonalize_evenly(stack, num_iterations, num_rounds, damping)
    for ours, matrix in zip(found, stack, strict=True):
        torch.testing.assert_close(ours, even(matrix, num_iterations, num_rounds, damping), rtol=1e-7, atol=1e-9)


def test_two_rounds_of_five_and_a_damping_of_a_half_are_usual() -> None:
    matrix = drawn(5, 2)
    torch.testing.assert_close(orthogonalize_evenly(matrix[None])[0], even(matrix, 5, 2, 0.5), rtol=1e-7, atol=1e-9)
    matrix[1] = 1e-9 * matrix[1]
    torch.testing.assert_close(orthogonalize_evenly(matrix[None])[0], even(matrix, 5, 2, 0.5), rtol=1e-7, atol=1e-9)
    matrix[1] = 0
    found = orthogonalize_evenly(matrix[None], num_rounds=3)[0]
    torch.testing.assert_close(found, even(matrix, 5, 3, 0.5), rtol=1e-7, atol=1e-9)


def test_types_are_kept_and_bfloat16_is_asked_for() -> None:
    for shape in ((5, 2), (2, 5)):
        for dtype in (torch.float16, torch.bfloat16):
            narrow = drawn(1, *shape).to(dtype)
            assert torch.equal(orthogonalize_evenly(narrow), orthogonalize_evenly(narrow.float()).to(dtype))
        wide = drawn(1, *shape)
        rounded = orthogonalize_evenly(wide, bfloat16=True)
        assert rounded.dtype is DOUBLE
        assert not torch.equal(rounded, orthogonalize_evenly(wide))
        assert torch.equal(rounded, rounded.bfloat16().double())
    wide = drawn(1, 2, 5)
    assert torch.equal(orthogonalize_evenly(wide, 3), orthogonalize(wide, 3))


def test_aurora_steps_each_group_with_its_own_rounds() -> None:
    own: list[dict[str, Any]] = [{}, {"num_rounds": 1}, {"damping": 1.0}, {"num_iterations": 2}, {"bfloat16": True}]
    parameters = [Parameter(drawn(5, 2)) for _ in own]
    groups = [{"params": [p], **one} for p, one in zip(parameters[:-1], own[:-1], strict=True)]
    optimizer = EvenRowMuon(groups, 0.5, 0.75, nesterov=False, weight_decay=0.25, num_rounds=3, damping=0.25)
    optimizer.add_param_group({"params": parameters[-1:], **own[-1]})
    for parameter in parameters:
        parameter.grad = drawn(5, 2, seed=1)
    optimizer.step()
    usual = {"num_iterations": 5, "num_rounds": 3, "damping": 0.25}
    for parameter, one in zip(parameters, own, strict=True):
        more = {key: value for key, value in one.items() if key != "bfloat16"}
        update = even(0.25 * drawn(5, 2, seed=1), **usual | more)
        expected = drawn(5, 2) * (1 - 0.125) - 0.5 * math.sqrt(2.5) * update
        exact = "bfloat16" not in one
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-8 if exact else 0.05)
        assert exact is torch.allclose(parameter.detach(), expected, rtol=0, atol=1e-8)


def test_what_is_usual_and_what_configurations_say_on() -> None:
    named = [("w", Parameter(torch.eye(2)))]
    muon = {"lr": 0.5, "momentum": 0.95, "nesterov": True, "num_iterations": 5, "scale": "aspect", "bfloat16": False}
    aurora = muon | {"weight_decay": 0.025, "num_rounds": 2, "damping": 0.5}
    normuon = muon | {"weight_decay": 0.0, "beta2": 0.95, "eps": 1e-8}
    assert options_of(EvenRowMuon([named[0][1]], 0.5)) == options_of(Aurora(lr=0.5).build(named)) == aurora
    assert options_of(RowNormalizedMuon([named[0][1]], 0.5)) == options_of(NorMuon(lr=0.5).build(named)) == normuon
    told: dict[str, Any] = {"momentum": 0.25, "nesterov": False, "weight_decay": 0.125, "num_iterations": 3}
    more: dict[str, Any] = {"num_rounds": 4, "damping": 0.75}
    for on in ({}, {"cautious": True}, {"hyperball": True, "weight_decay": 0.0}):
        made = options_of(Aurora(lr=0.5, **told | more | on).build(named))
        assert made == aurora | told | more | on
        assert made == options_of(EvenRowMuon([named[0][1]], 0.5, **told | more | on))
    more = {"beta2": 0.75, "eps": 0.25, "cautious": True}
    made = options_of(NorMuon(lr=0.5, **told | more).build(named))
    assert made == normuon | told | more == options_of(RowNormalizedMuon([named[0][1]], 0.5, **told | more))
    for kind in (Aurora, NorMuon):
        assert kind(lr=0.1).parameters is matrices


def test_options_out_of_range_are_refused_by_hand_and_in_configurations() -> None:
    weight = Parameter(torch.eye(2))
    for num_rounds, damping in ((0, 0.5), (2, 0.0), (2, 1.0001), (2, float("nan"))):
        for make in (lambda **more: EvenRowMuon([weight], **more), Aurora):
            make(lr=0.0, num_rounds=1, damping=1.0)
            with pytest.raises(PlanError, match=rf"^Aurora can't use num_rounds={num_rounds}, damping={damping}\. Use"):
                make(lr=0.1, num_rounds=num_rounds, damping=damping)
    for options, says in (
        ({"beta2": 1.0}, r"betas=\(1\.0,\)"),
        ({"beta2": -0.5}, r"betas=\(-0\.5,\)"),
        ({"eps": 0.0}, r"eps=0\.0\. Use a number > 0"),
        ({"eps": float("nan")}, "eps=nan"),
    ):
        for build in (lambda **more: RowNormalizedMuon([weight], **more), NorMuon):
            build(lr=0.0, beta2=0.0, eps=1e-30)
            with pytest.raises(PlanError, match=f"^NorMuon can't use {says}"):
                build(lr=0.1, **options)
