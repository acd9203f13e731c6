"""Muon's step, number by number: singular values and decays written out in float64, and what is kept between steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim.muon import OrthogonalizedMomentum, _batches, _factor, _matrix_shape, orthogonalize

DOUBLE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def polar(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Apply the polynomial to the singular values alone."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(num_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (3, 3), (1, 4)])
@pytest.mark.parametrize("num_iterations", [0, 1, 3])
def test_each_matrix_of_a_stack_has_its_singular_values_moved_by_itself(
    shape: tuple[int, int], num_iterations: int
) -> None:
    stack = torch.stack([drawn(*shape), 1e3 * drawn(*shape, seed=1), 1e-3 * drawn(*shape, seed=2)])
    found = orthogonalize(stack, num_iterations)
    assert (found.shape, found.dtype) == (stack.shape, DOUBLE)
    for ours, matrix in zip(found, stack, strict=True):
        torch.testing.assert_close(ours, polar(matrix, num_iterations), rtol=1e-9, atol=1e-12)


def test_five_iterations_are_usual_and_a_norm_below_the_smallest_is_divided_by_that() -> None:
    matrix = drawn(1, 3, 4)
    assert torch.equal(orthogonalize(matrix), orthogonalize(matrix, 5))
    tiny = torch.tensor([[[1e-9, 0.0], [0.0, 0.0]]], dtype=DOUBLE)
    expected = 3.4445e-2 - 4.7750e-6 + 2.0315e-10
    assert float(orthogonalize(tiny, 1)[0, 0, 0]) == pytest.approx(expected, rel=1e-12)


def test_narrow_types_are_computed_in_float32_and_bfloat16_where_it_is_asked_for() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        narrow = drawn(2, 4, 3).to(dtype)
        assert torch.equal(orthogonalize(narrow), orthogonalize(narrow.float()).to(dtype))
    for dtype in (torch.float32, DOUBLE):
        wide = drawn(2, 4, 3).to(dtype)
        rounded = orthogonalize(wide, bfloat16=True)
        assert rounded.dtype is dtype
        assert torch.equal(rounded, rounded.bfloat16().to(dtype))
        assert not torch.equal(orthogonalize(wide), orthogonalize(wide).bfloat16().to(dtype))


def by_hand(
    starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]], lr: float, **options: Any
) -> list[Tensor]:
    """Step weights with the post's loop, 2510.12402's mask and 2606.16899's sphere."""
    momentum, decay = options.get("momentum", 0.95), options.get("weight_decay", 0.0)
    weights, averages = [one.clone() for one in starts], [torch.zeros_like(one) for one in starts]
    for each in gradients:
        for i, g in enumerate(each):
            if g is None:
                continue
            averages[i] = momentum * averages[i] + (1 - momentum) * g
            ahead = averages[i]
            if options.get("nesterov", True):
                ahead = momentum * averages[i] + (1 - momentum) * g
            flat = ahead.reshape(ahead.shape[0], -1)
            update, x = polar(flat, options.get("num_iterations", 5)).view_as(g), weights[i]
            if options.get("hyperball"):
                radius = float(starts[i].norm())
                moved = x - lr * radius * update / update.norm()
                weights[i] = radius * moved / moved.norm()
                continue
            rows, columns = flat.shape
            height = math.sqrt(max(1, rows / columns))
            if options.get("scale") == "rms":
                height = 0.2 * math.sqrt(max(rows, columns))
            agrees = (update * x >= 0).double() if options.get("cautious") else torch.ones_like(x)
            weights[i] = x - lr * decay * agrees * x - lr * height * update
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"momentum": 0.8, "nesterov": False, "weight_decay": 0.5},
        {"momentum": 0.8, "weight_decay": 0.5, "cautious": True},
        {"scale": "rms", "num_iterations": 2},
        {"cautious": True},
        {"hyperball": True, "momentum": 0.7},
        {"hyperball": True, "scale": "rms", "num_iterations": 3},
    ],
)
def test_steps_are_the_posts_loop(options: dict[str, Any]) -> None:
    shapes = [(6, 2), (2, 6), (3, 2, 2), (3, 3)]
    starts = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    gradients: list[list[Tensor | None]] = [
        # The third is absent at first, and the second in between.
        [None if (i, t) in ((2, 0), (1, 1)) else drawn(*shape, seed=10 * t + i + 4) for i, shape in enumerate(shapes)]
        for t in range(3)
    ]
    parameters = [Parameter(start.clone()) for start in starts]
    optimizer = OrthogonalizedMomentum(parameters, 0.1, **options)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient if gradient is None else gradient.clone()
        optimizer.step()
        for parameter, gradient in zip(parameters, each, strict=True):
            assert gradient is None or torch.equal(gradient, parameter.grad), "gradients are left as they are"
    for parameter, expected in zip(parameters, by_hand(starts, gradients, 0.1, **options), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-8, atol=1e-10)
    kept = {"momentum_buffer", "radius"} if options.get("hyperball") else {"momentum_buffer"}
    assert all(optimizer.state[parameter].keys() == kept for parameter in parameters)


def test_each_group_has_options_of_its_own() -> None:
    starts, gradients = [drawn(4, 3, seed=i) for i in range(3)], [drawn(4, 3, seed=i + 3) for i in range(3)]
    own: list[dict[str, Any]] = [{"weight_decay": 0.5}, {"scale": "rms"}, {"hyperball": True}]
    parameters = [Parameter(start.clone()) for start in starts]
    optimizer = OrthogonalizedMomentum([{"params": [p], **one} for p, one in zip(parameters, own, strict=True)], 0.1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    for i, parameter in enumerate(parameters):
        [expected] = by_hand([starts[i]], [[gradients[i]]], 0.1, **own[i])
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-8, atol=1e-10)


def test_a_sphere_is_that_of_the_first_step() -> None:
    parameter = Parameter(drawn(3, 2))
    optimizer = OrthogonalizedMomentum([parameter], 0.1, hyperball=True)
    radius = float(parameter.detach().norm())
    for number in range(2):
        parameter.grad = drawn(3, 2, seed=number)
        optimizer.step()
        assert float(parameter.detach().norm()) == pytest.approx(radius, rel=1e-12)
        with torch.no_grad():
            parameter.mul_(3)


def test_matrices_are_taken_together_by_shape_in_bfloat16_and_each_by_itself_on_a_processor() -> None:
    parameters = [Parameter(drawn(*shape)) for shape in ((3, 4), (4, 3), (3, 2, 2), (4, 3))]
    for bfloat16, expected in ((False, [[0], [1], [2], [3]]), (True, [[0, 2], [1, 3]])):
        optimizer = OrthogonalizedMomentum(parameters, 0.1, bfloat16=bfloat16)
        for batches in (optimizer.kept_together(optimizer.param_groups[0]), _batches(optimizer.param_groups[0])):
            places = [[next(i for i, p in enumerate(parameters) if p is one) for one in batch] for batch in batches]
            assert places == expected


def test_a_batch_is_a_job_in_which_who_is_absent_is_zero() -> None:
    one, other = Parameter(drawn(4, 2, 1)), Parameter(drawn(4, 1, 2, seed=1))
    optimizer = OrthogonalizedMomentum([one, other], 0.1, num_iterations=2)
    direction = drawn(4, 2, seed=2)
    for given, stack in (
        ({id(one): direction}, [direction, torch.zeros(4, 2, dtype=DOUBLE)]),
        ({id(other): direction}, [torch.zeros(4, 2, dtype=DOUBLE), direction]),
    ):
        job = optimizer._job([one, other], given, optimizer.param_groups[0])
        assert (job.cost, job.shape) == (2 * 4 * 2 * 2, (2, 4, 2))
        assert (job.like.dtype, job.like.shape) == (DOUBLE, (4, 2))
        assert torch.equal(job.run(), orthogonalize(torch.stack(stack), 2))


def test_only_batches_with_a_gradient_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [Parameter(drawn(2, 3)), Parameter(drawn(3, 2)), Parameter(drawn(2, 3, seed=1))]
    optimizer = OrthogonalizedMomentum(parameters, 0.1, bfloat16=True)
    seen = list[tuple[int, ...]]()

    def watched(stack: Tensor, group: dict[str, Any]) -> Tensor:
        assert group is optimizer.param_groups[0]
        seen.append(tuple(stack.shape))
        return stack

    monkeypatch.setattr(optimizer, "orthogonalized", watched)
    parameters[2].grad = torch.ones(2, 3, dtype=DOUBLE)
    optimizer.step()
    assert seen == [(2, 2, 3)]


def test_shapes_and_heights() -> None:
    shapes = [(3, 4), (5, 1), (3, 2, 2), (7, 1, 3, 2)]
    assert [_matrix_shape(torch.empty(shape)) for shape in shapes] == [(3, 4), (5, 1), (3, 4), (7, 6)]
    assert [_factor("aspect", *shape) for shape in ((2, 8), (8, 2), (3, 3))] == [1.0, 2.0, 1.0]
    assert [_factor("rms", *shape) for shape in ((9, 4), (4, 9), (4, 4))] == pytest.approx([0.6, 0.6, 0.4], rel=1e-15)


def test_what_is_usual_and_what_is_off_leaves_no_trace() -> None:
    weight = Parameter(torch.eye(2))
    usual = {
        "lr": 0.25,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.0,
        "num_iterations": 5,
        "scale": "aspect",
        "bfloat16": False,
    }
    for more in ({}, {"cautious": True}, {"hyperball": True}, {"cautious": True, "hyperball": True}):
        [group] = OrthogonalizedMomentum([weight], 0.25, **more).param_groups
        assert {key: value for key, value in group.items() if key != "params"} == usual | more


@pytest.mark.parametrize(
    "options",
    [{"lr": -0.1}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"num_iterations": 0}, {"scale": ""}],
)
def test_each_option_out_of_range_is_told_with_all_of_them(options: dict[str, Any]) -> None:
    given = {"lr": 0.5, "momentum": 0.25, "weight_decay": 0.125, "num_iterations": 3, "scale": "rms", **options}
    with pytest.raises(PlanError) as caught:
        OrthogonalizedMomentum([Parameter(torch.eye(2))], **given)
    assert str(caught.value).startswith(f"Muon can't use {', '.join(f'{k}={v!r}' for k, v in given.items())}. Use lr")


def test_vectors_of_any_group_are_refused_with_their_number_and_the_first_shapes() -> None:
    matrix, vectors = Parameter(torch.eye(2)), [Parameter(torch.ones(n)) for n in range(1, 7)]
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": vectors}]
    with pytest.raises(
        PlanError, match=r"and 6 parameter\(s\) .* \(shapes \[\(1,\), \(2,\), \(3,\), \(4,\), \(5,\)\]\)"
    ):
        OrthogonalizedMomentum(groups, 0.1)
    with pytest.raises(PlanError, match=r"and 1 parameter\(s\) have less than two dimensions \(shapes \[\(\)\]\)"):
        OrthogonalizedMomentum([matrix, Parameter(torch.tensor(1.0))], 0.1)


def test_what_cannot_be_kept_on_a_sphere_is_refused_in_any_group() -> None:
    one, zero = Parameter(torch.eye(2)), Parameter(torch.zeros(2, 2))
    with pytest.raises(PlanError, match=r"^Hyperball keeps the norm .* begin at 0"):
        OrthogonalizedMomentum([{"params": [one]}, {"params": [zero]}], 0.1, hyperball=True)
    with pytest.raises(PlanError, match=r"^Muon can't use hyperball=True with weight_decay=0\.5"):
        OrthogonalizedMomentum([{"params": [one]}, {"params": [zero], "weight_decay": 0.5}], 0.1, hyperball=True)
    OrthogonalizedMomentum([one, zero], 0.1)
