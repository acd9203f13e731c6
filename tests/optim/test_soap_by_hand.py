"""SOAP's step with matrices of its own for each side, written out; which sides have a basis, and when it's renewed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import SOAP
from cosmati.optim.soap import EigenbasisAdam, _basis_job, _gram, _has_basis, _rotated, _wide

DOUBLE = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


class ByHand:
    """Algorithm 3 of 2409.11321 for one matrix [rows, columns], with a decay of its own for the Gram matrices."""

    def __init__(self, start: Tensor, **options: Any) -> None:
        self.x, self.t = start, 0
        self.m, self.v = torch.zeros_like(start), torch.zeros_like(start)
        self.options, self.grams, self.bases = options, list[Tensor](), list[Tensor]()

    def step(self, g: Tensor) -> None:
        (b1, b2), lr, longest = self.options["betas"], self.options["lr"], self.options["longest"]
        gram_beta, decay, eps = self.options["gram_beta"], self.options["decay"], self.options["eps"]
        fresh = [g @ g.T, g.T @ g]
        has = [1 < side <= longest for side in g.shape]
        if not self.bases:
            self.grams = [(1 - gram_beta) * one for one in fresh]
            self.bases = [
                torch.linalg.eigh(one).eigenvectors if own else torch.eye(len(one), dtype=DOUBLE)
                for one, own in zip(self.grams, has, strict=True)
            ]
            if any(has):
                return
        self.t += 1
        left, right = self.bases
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
        adam = left.T @ self.m @ right / (1 - b1**self.t) / ((self.v / (1 - b2**self.t)).sqrt() + eps)
        self.x = self.x - lr * decay * self.x - lr * left @ adam @ right.T
        self.grams = [gram_beta * old + (1 - gram_beta) * new for old, new in zip(self.grams, fresh, strict=True)]
        if self.t % self.options["frequency"] == 0:
            self.bases = [
                torch.linalg.qr(gram @ basis).Q if own else basis
                for gram, basis, own in zip(self.grams, self.bases, has, strict=True)
            ]


@pytest.mark.parametrize(
    ("shape", "longest", "kept"),
    [
        ((3, 4), 4, {"rows", "columns"}),
        ((3, 4), 3, {"rows"}),
        ((4, 3), 3, {"columns"}),
        ((3, 4), 2, set()),
        ((1, 2), 9, {"columns"}),
        ((2, 1), 9, {"rows"}),
    ],
)
@pytest.mark.parametrize("gram_beta", [None, 0.5])
def test_each_side_has_its_own_basis(
    shape: tuple[int, int], longest: int, kept: set[str], gram_beta: float | None
) -> None:
    start, other = drawn(*shape), drawn(*shape, seed=1)
    parameters = [Parameter(start.clone()), Parameter(other.clone())]
    optimizer = EigenbasisAdam(
        parameters, 0.1, (0.8, 0.7), gram_beta, 0.125, 0.5, precondition_frequency=2, max_precondition_dim=longest
    )
    told: dict[str, Any] = {"betas": (0.8, 0.7), "lr": 0.1, "gram_beta": 0.7 if gram_beta is None else gram_beta}
    told |= {"eps": 0.125, "decay": 0.5, "frequency": 2, "longest": longest}
    hands = [ByHand(start, **told), ByHand(other, **told)]
    for t in range(6):
        for i, (parameter, hand) in enumerate(zip(parameters, hands, strict=True)):
            gradient = drawn(*shape, seed=10 * t + i + 2)
            parameter.grad = gradient.clone() if (i, t) not in ((1, 0), (1, 3)) else None
            if parameter.grad is not None:
                hand.step(gradient)
        optimizer.step()
        for parameter, hand in zip(parameters, hands, strict=True):
            torch.testing.assert_close(parameter.detach(), hand.x, rtol=1e-9, atol=1e-11)
    state, hand = optimizer.state[parameters[0]], hands[0]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} | {f"{k}_{s}" for k in ("gram", "basis") for s in kept}
    assert int(state["step"]) == hand.t == (5 if kept else 6)
    for number, side in enumerate(("rows", "columns")):
        if side in kept:
            torch.testing.assert_close(state[f"gram_{side}"], hand.grams[number], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(state[f"basis_{side}"], hand.bases[number], rtol=1e-9, atol=1e-9)


def test_the_first_step_of_a_matrix_only_looks_and_that_of_a_vector_moves_it() -> None:
    matrix, vector = Parameter(torch.ones(2, 2)), Parameter(torch.ones(3))
    optimizer = EigenbasisAdam([matrix, vector], 0.5, weight_decay=0.0)
    matrix.grad, vector.grad = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    assert matrix.tolist() == [[1, 1], [1, 1]]
    assert vector.tolist() == pytest.approx([0.5, 1.5, 1.0])
    assert (int(optimizer.state[matrix]["step"]), int(optimizer.state[vector]["step"])) == (0, 1)
    assert optimizer.state[vector].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not optimizer.state[matrix]["exp_avg"].any()


def test_each_group_has_options_of_its_own() -> None:
    own: list[dict[str, Any]] = [{"max_precondition_dim": 2}, {"precondition_frequency": 1}, {"gram_beta": 0.0}]
    parameters = [Parameter(drawn(3, 2)) for _ in own]
    optimizer = EigenbasisAdam([{"params": [p], **one} for p, one in zip(parameters, own, strict=True)], 0.1)
    usual: dict[str, Any] = {"betas": (0.95, 0.95), "lr": 0.1, "gram_beta": 0.95, "eps": 1e-8, "decay": 0.01}
    usual |= {"frequency": 10, "longest": 10_000}
    names = {"max_precondition_dim": "longest", "precondition_frequency": "frequency", "gram_beta": "gram_beta"}
    hands = [ByHand(drawn(3, 2), **usual | {names[k]: v for k, v in one.items()}) for one in own]
    for t in range(4):
        for parameter, hand in zip(parameters, hands, strict=True):
            parameter.grad = drawn(3, 2, seed=t + 1)
            hand.step(drawn(3, 2, seed=t + 1))
        optimizer.step()
    for parameter, hand in zip(parameters, hands, strict=True):
        torch.testing.assert_close(parameter.detach(), hand.x, rtol=1e-7, atol=1e-9)


def test_a_basis_is_a_job_of_the_cube_of_its_side() -> None:
    gram = drawn(3, 3)
    gram = gram @ gram.T
    first = _basis_job(gram, None)
    assert (first.cost, first.shape) == (27.0, (3, 3))
    assert first.like is gram
    basis = first.run()
    values = basis.T @ gram @ basis
    torch.testing.assert_close(values, torch.diag(values.diagonal()), rtol=0, atol=1e-12)
    renewed = _basis_job(gram, torch.eye(3, dtype=DOUBLE))
    assert renewed.cost == 27.0
    q = renewed.run()
    triangle = q.T @ gram
    torch.testing.assert_close(q.T @ q, torch.eye(3, dtype=DOUBLE))
    torch.testing.assert_close(triangle, triangle.triu(), rtol=0, atol=1e-12)


def test_sides_grams_and_rotations() -> None:
    matrix = drawn(3, 2)
    cases = {
        (3, 2): (True, True),
        (3, 1): (True, False),
        (1, 2): (False, True),
        (4, 2): (False, True),
        (3,): (False,) * 2,
    }
    for shape, expected in cases.items():
        assert (_has_basis(torch.empty(shape), "rows", 3), _has_basis(torch.empty(shape), "columns", 3)) == expected
    torch.testing.assert_close(_gram(matrix, "rows"), torch.einsum("ik,jk->ij", matrix, matrix))
    torch.testing.assert_close(_gram(matrix, "columns"), torch.einsum("ki,kj->ij", matrix, matrix))
    rows, columns = (torch.linalg.qr(drawn(n, n, seed=n)).Q for n in (3, 2))
    for state in ({}, {"basis_rows": rows}, {"basis_columns": columns}, {"basis_rows": rows, "basis_columns": columns}):
        left, right = state.get("basis_rows", torch.eye(3).double()), state.get("basis_columns", torch.eye(2).double())
        there = _rotated(matrix, state, back=False)
        torch.testing.assert_close(there, torch.einsum("ki,kl,lj->ij", left, matrix, right))
        torch.testing.assert_close(_rotated(there, state, back=True), matrix)
    assert [_wide(torch.ones(1, dtype=d)).dtype for d in (torch.float16, torch.bfloat16, torch.float32, DOUBLE)] == [
        *(torch.float32,) * 3,
        DOUBLE,
    ]


def test_what_is_usual_and_what_the_configuration_says_on() -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    usual = {
        "lr": 3e-3,
        "betas": (0.95, 0.95),
        "gram_beta": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "precondition_frequency": 10,
        "max_precondition_dim": 10_000,
    }
    for built in (EigenbasisAdam([named[0][1]]), SOAP(lr=3e-3).build(named)):
        [group] = built.param_groups
        assert {key: value for key, value in group.items() if key != "params"} == usual
    options: dict[str, Any] = {"lr": 0.5, "betas": (0.7, 0.8), "gram_beta": 0.6, "eps": 0.25}
    options |= {"precondition_frequency": 3, "max_precondition_dim": 7}
    groups = SOAP(weight_decay=0.125, decay_vectors=False, **options).build(named).param_groups
    assert [one["weight_decay"] for one in groups] == [0.125, 0.0]
    assert all({key: one[key] for key in options} == options for one in groups)
    assert EigenbasisAdam([named[0][1]], betas=(0.7, 0.8)).param_groups[0]["gram_beta"] == 0.8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"betas": (1.0, 0.5)}, r"betas=\(1\.0, 0\.5, 0\.5\)"),
        ({"betas": (0.5, 1.0)}, r"betas=\(0\.5, 1\.0, 1\.0\)"),
        ({"betas": (0.5, 0.25), "gram_beta": 1.0}, r"betas=\(0\.5, 0\.25, 1\.0\)"),
        ({"weight_decay": -0.5}, r"weight_decay=-0\.5"),
        ({"eps": 0.0}, r"eps=0\.0, precondition_frequency=10\. Use eps > 0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"precondition_frequency": 0}, r"eps=1e-08, precondition_frequency=0\. Use"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    for make in (lambda **more: EigenbasisAdam([Parameter(torch.eye(2))], **more), SOAP):
        make(lr=0.1, gram_beta=0.0, eps=1e-30, weight_decay=0.0, precondition_frequency=1)
        with pytest.raises(PlanError, match=f"SOAP can't use .*{says}"):
            make(**{"lr": 0.1, **options})
