"""Cautious decay, Hyperball and Aurora against the papers' formulas in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import AdamW, Aurora, Lion, Muon, NorMuon, Optimizer, matrices
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.aurora import EvenRowMuon, orthogonalize_evenly
from cosmati.optim.lion import SignMomentum
from cosmati.optim.muon import OrthogonalizedMomentum, orthogonalize
from cosmati.optim.normuon import RowNormalizedMuon

torch.set_num_threads(1)
STEPS = 12
DOUBLE = torch.float64


def draws(shape: tuple[int, ...], num: int = STEPS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=DOUBLE, generator=generator) for _ in range(num)]


def stepped(optimizer: Any, parameter: Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def quintic(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Muon's polynomial on the singular values alone."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def decayed(x: Tensor, u: Tensor, rate: float) -> Tensor:
    """Algorithm 1 of 2510.12402, number by number."""
    flat = [w - rate * w if v * w >= 0 else w for w, v in zip(x.flatten().tolist(), u.flatten().tolist(), strict=True)]
    return torch.tensor(flat, dtype=DOUBLE).view_as(x)


def adam_updates(gradients: list[Tensor], beta1: float, beta2: float, eps: float) -> list[Tensor]:
    m, v, found = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]), []
    for t, g in enumerate(gradients, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        found.append(m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps))
    return found


def lion_updates(gradients: list[Tensor], beta1: float, beta2: float) -> list[Tensor]:
    m, found = torch.zeros_like(gradients[0]), []
    for g in gradients:
        found.append((beta1 * m + (1 - beta1) * g).sign())
        m = beta2 * m + (1 - beta2) * g
    return found


def muon_updates(gradients: list[Tensor], beta: float) -> list[Tensor]:
    m, found = torch.zeros_like(gradients[0]), []
    for g in gradients:
        m = beta * m + (1 - beta) * g
        found.append(math.sqrt(max(1, g.shape[0] / g.shape[1])) * quintic(beta * m + (1 - beta) * g))
    return found


def test_cautious_decay_is_algorithm_1() -> None:
    start, gradients = draws((6, 4), 1, seed=3)[0], draws((6, 4))
    cases: list[tuple[Any, dict[str, Any], list[Tensor]]] = [
        (BoundedAdamW, {"betas": (0.8, 0.9), "eps": 1e-3}, adam_updates(gradients, 0.8, 0.9, 1e-3)),
        (SignMomentum, {"betas": (0.7, 0.9)}, lion_updates(gradients, 0.7, 0.9)),
        (OrthogonalizedMomentum, {"momentum": 0.9}, muon_updates(gradients, 0.9)),
    ]
    for kind, options, updates in cases:
        w = Parameter(start.clone())
        found = stepped(kind([w], 0.1, weight_decay=0.5, cautious=True, **options), w, gradients)
        x, num_agreed = start, 0
        for u in updates:
            num_agreed += int((u * x >= 0).sum())
            x = decayed(x, u, 0.1 * 0.5) - 0.1 * u
        torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-11)
        assert 0 < num_agreed < STEPS * 24, "the case has both"


def test_normuons_decay_is_cautious_too() -> None:
    """Its rows are scaled by positive numbers, so its signs are those of the orthogonalized momentum."""
    start, gradient = draws((5, 3), 1, seed=3)[0], draws((5, 3), 1)[0]
    options: dict[str, Any] = {"momentum": 0.0, "nesterov": False}
    plain, cautious = Parameter(start.clone()), Parameter(start.clone())
    stepped(RowNormalizedMuon([plain], 0.1, **options), plain, [gradient])
    stepped(RowNormalizedMuon([cautious], 0.1, weight_decay=0.5, cautious=True, **options), cautious, [gradient])
    expected = plain.detach() + decayed(start, start - plain.detach(), 0.05) - start
    torch.testing.assert_close(cautious.detach(), expected, rtol=1e-9, atol=1e-12)


def test_signs_agree_where_a_product_would_vanish() -> None:
    """In float32 1e-30 times -1e-30 is -0, which is >= 0."""
    w = Parameter(torch.tensor([1e-30, -1e-30, 1e-30]))
    stepped(SignMomentum([w], 1e-32, weight_decay=1e31, cautious=True), w, [torch.tensor([-1.0, 1.0, 1.0])])
    assert w.tolist() == pytest.approx([1.01e-30, -1.01e-30, 0.89e-30])


def test_plain_adamw_is_pytorchs() -> None:
    """Where every sign agrees, cautious decay is decoupled decay."""
    start, gradients = draws((4, 3), 1)[0].abs() + 9, [g.abs() for g in draws((4, 3), 6)]
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    found = stepped(BoundedAdamW([ours], 0.1, weight_decay=0.3, cautious=True), ours, gradients)
    expected = stepped(torch.optim.AdamW([theirs], 0.1, weight_decay=0.3), theirs, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for decay in (0.0, 0.3):
        start, gradients = draws((4, 3), 1, seed=5)[0], draws((4, 3), 6)
        ours, theirs = Parameter(start.clone()), Parameter(start.clone())
        found = stepped(BoundedAdamW([ours], 0.1, weight_decay=decay), ours, gradients)
        expected = stepped(torch.optim.AdamW([theirs], 0.1, weight_decay=decay), theirs, gradients)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hyperball_is_the_papers(dtype: torch.dtype) -> None:
    start, gradients = draws((6, 4), 1, seed=3)[0].to(dtype), [g.to(dtype).double() for g in draws((6, 4), 5)]
    cases: list[tuple[Any, dict[str, Any], list[Tensor]]] = [
        (BoundedAdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0}, adam_updates(gradients, 0.8, 0.9, 1e-8)),
        (OrthogonalizedMomentum, {"momentum": 0.9}, muon_updates(gradients, 0.9)),
        (OrthogonalizedMomentum, {"momentum": 0.9, "scale": "rms"}, muon_updates(gradients, 0.9)),
    ]
    for kind, options, updates in cases:
        w = Parameter(start.clone())
        found = stepped(kind([w], 0.1, hyperball=True, **options), w, gradients)
        x = start.double()
        radius = float(x.norm())
        for u in updates:
            moved = x - 0.1 * radius * u / u.norm()
            x = radius * moved / moved.norm()
        exact = dtype is DOUBLE
        torch.testing.assert_close(found.double(), x, rtol=1e-9 if exact else 0, atol=1e-11 if exact else 0.1)
        assert float(found.double().norm()) == pytest.approx(radius, rel=1e-12 if exact else 0.01)


def test_hyperball_takes_any_scale_of_gradient_and_a_zero_one() -> None:
    start, gradients = draws((6, 4), 1, seed=3)[0], draws((6, 4), 4)
    ends = []
    for scale in (1.0, 2.0**-10):
        w = Parameter(start.clone())
        ends.append(
            stepped(OrthogonalizedMomentum([w], 0.1, hyperball=True), w, [g * scale for g in gradients]).clone()
        )
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)
    w = Parameter(start.clone())
    stepped(OrthogonalizedMomentum([w], 0.1, hyperball=True), w, [torch.zeros_like(start)])
    torch.testing.assert_close(w.detach(), start, rtol=1e-15, atol=0)


def test_aurora_is_the_papers() -> None:
    for shape in ((9, 4), (4, 9), (5, 5)):
        start, gradients = draws(shape, 1, seed=3)[0], draws(shape, 5)
        w = Parameter(start.clone())
        optimizer = EvenRowMuon([w], 0.1, 0.9, nesterov=False, weight_decay=0.3, num_rounds=3, damping=0.25)
        found = stepped(optimizer, w, gradients)
        x, m = start, torch.zeros_like(start)
        rows, columns = shape
        for g in gradients:
            m = 0.9 * m + 0.1 * g
            u = quintic(m)
            if rows > columns:
                scales = [1 / math.sqrt(sum(a * a for a in row)) for row in m.tolist()]
                for k in range(3):
                    u = quintic(torch.diag(torch.tensor(scales, dtype=DOUBLE)) @ m)
                    lengths = [sum(a * a for a in row) for row in u.tolist()]
                    if k < 2:
                        scales = [d * (columns / rows / q) ** 0.25 for d, q in zip(scales, lengths, strict=True)]
            x = x - 0.1 * 0.3 * x - 0.1 * math.sqrt(max(1, rows / columns)) * u
        torch.testing.assert_close(found, x, rtol=1e-8, atol=1e-10)


def test_aurora_evens_rows_and_leaves_what_isnt_tall() -> None:
    """One neuron's gradient is a thousandth of the others': its row is as long as theirs, and columns orthogonal."""
    momentum = draws((32, 8), 1)[0]
    momentum[0] *= 1e-3
    muon, aurora = orthogonalize(momentum[None])[0], orthogonalize_evenly(momentum[None])[0]

    def spread(update: Tensor) -> float:
        lengths = update.norm(dim=1)
        return float(lengths.max() / lengths.min())

    assert spread(muon) > 100
    assert spread(aurora) < 2
    assert spread(orthogonalize_evenly(momentum[None], num_rounds=8)[0]) < 1.2
    values = torch.linalg.svdvals(aurora)
    assert float(values.max()) < 1.25
    assert float(values.min()) > 0.6
    for shape in ((1, 4, 9), (1, 5, 5)):
        wide = draws(shape, 1)[0]
        assert torch.equal(orthogonalize_evenly(wide), orthogonalize(wide))
    with_dead_row = momentum.clone()
    with_dead_row[3] = 0
    assert bool(orthogonalize_evenly(with_dead_row[None], num_rounds=5).isfinite().all())
    assert bool((orthogonalize_evenly(torch.zeros(1, 6, 2)) == 0).all())


def test_what_is_off_leaves_no_trace_in_groups() -> None:
    named = [("weight", Parameter(torch.ones(4, 3)))]
    off: list[Optimizer] = [AdamW(lr=0.1), Lion(lr=0.1), Muon(lr=0.1), NorMuon(lr=0.1)]
    for configuration in off:
        built = configuration.build(named)
        assert not {"cautious", "hyperball"} & built.param_groups[0].keys()
        on = dataclasses.replace(configuration, cautious=True, weight_decay=0.1).build(named)
        assert on.param_groups[0]["cautious"]
        assert "hyperball" not in on.param_groups[0]
    assert type(AdamW(lr=0.1).build(named)) is torch.optim.AdamW
    assert AdamW(lr=0.1, hyperball=True, weight_decay=0.0).build(named).param_groups[0]["hyperball"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda w, v, z: AdamW(lr=0.1, hyperball=True).build([w]), "weight_decay=0.0"),
        (lambda w, v, z: Muon(lr=0.1, hyperball=True, weight_decay=0.1).build([w]), "weight_decay=0.0"),
        (lambda w, v, z: AdamW(lr=0.1, hyperball=True, weight_decay=0.0).build([w, v]), "parameters=matrices"),
        (lambda w, v, z: Muon(lr=0.1, hyperball=True).build([w, z]), "begin at 0"),
        (lambda w, v, z: Aurora(lr=0.1, hyperball=True, weight_decay=0.0).build([z]), "begin at 0"),
        (lambda w, v, z: AdamW(lr=0.1, fused=True, cautious=True), "Leave it out"),
        (lambda w, v, z: Aurora(lr=0.1, num_rounds=0), "one round at least"),
        (lambda w, v, z: EvenRowMuon([w[1]], 0.1, damping=0.0), r"damping in \(0, 1\]"),
        (lambda w, v, z: BoundedAdamW([w[1]], -0.1), "lr=-0.1"),
    ],
)
def test_nonsense_is_refused(make: Any, says: str) -> None:
    weight, vector, zero = Parameter(torch.ones(3, 2)), Parameter(torch.ones(3)), Parameter(torch.zeros(3, 2))
    with pytest.raises(PlanError, match=says):
        make(("weight", weight), ("vector", vector), ("zero", zero))


def test_matrices_filter_gives_hyperball_what_it_takes() -> None:
    optimizer = AdamW(lr=0.1, hyperball=True, weight_decay=0.0, parameters=matrices)
    assert optimizer.takes("blocks.0.up.weight", Parameter(torch.ones(3, 2)))
    assert not optimizer.takes("norm.weight", Parameter(torch.ones(3)))
