"""NorMuon, Sophia and schedule-free AdamW against the papers' recurrences in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.methods import EMA
from cosmati.optim import Muon, NorMuon, ScheduleFreeAdamW, Sophia
from cosmati.optim.muon import orthogonalize
from cosmati.optim.normuon import RowNormalizedMuon
from cosmati.optim.schedule_free import ScheduleFree
from cosmati.optim.sophia import ClippedCurvature
from tests.optim.test_optimizer_contract import trainer

STEPS = 30


def gradients(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(STEPS)]


def stepped(optimizer: Any, parameter: Parameter, all_gradients: list[Tensor]) -> Tensor:
    for gradient in all_gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_sophia_is_algorithm_3_with_true_labels() -> None:
    start = torch.randn(4, 3, dtype=torch.float64)
    w = Parameter(start.clone())
    optimizer = ClippedCurvature([w], 0.1, (0.9, 0.8), 0.05, num_labels=7, update_interval=3, weight_decay=0.2)
    found = stepped(optimizer, w, gradients((4, 3)))
    x, m, h = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    clipped = 0
    for step, g in enumerate(gradients((4, 3))):
        m = 0.9 * m + 0.1 * g
        if step % 3 == 0:
            h = 0.8 * h + 0.2 * 7 * g * g
        ratio = m / torch.clamp(0.05 * h, min=1e-12)
        clipped += int((ratio.abs() > 1).sum())
        x = x - 0.1 * 0.2 * x - 0.1 * torch.clamp(ratio, -1, 1)
    torch.testing.assert_close(found, x, rtol=1e-10, atol=1e-12)
    assert 0 < clipped < STEPS * 12


def test_sophia_takes_an_estimate_of_the_users_own() -> None:
    w = Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = ClippedCurvature([w], 0.1, (0.0, 0.5), 1.0, update_interval=0, weight_decay=0.0)
    optimizer.update_curvature({w: torch.tensor([2.0, 100.0], dtype=torch.float64)})
    stepped(optimizer, w, [torch.tensor([0.5, 5.0], dtype=torch.float64)])
    assert w.tolist() == pytest.approx([-0.1 * 0.5 / 1.0, -0.1 * 5 / 50])


def test_normuon_is_the_papers() -> None:
    start = torch.randn(6, 4, dtype=torch.float64)
    w = Parameter(start.clone())
    optimizer = RowNormalizedMuon([w], 0.1, 0.9, 0.8, 1e-8, nesterov=False, weight_decay=0.3)
    found = stepped(optimizer, w, gradients((6, 4)))
    x, m, v = start.clone(), torch.zeros_like(start), torch.zeros(6, 1, dtype=torch.float64)
    for g in gradients((6, 4)):
        m = 0.9 * m + 0.1 * g
        o = orthogonalize(m[None])[0]
        v = 0.8 * v + 0.2 * (o * o).mean(1, keepdim=True)
        o = o / (v.sqrt() + 1e-8)
        x = x - 0.1 * 0.3 * x - 0.1 * 0.2 * (24**0.5) / torch.linalg.matrix_norm(o) * o
    torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-11)


def test_normuon_gives_every_row_its_part() -> None:
    """One row has hardly a gradient: Muon moves it less, NorMuon as much as the others in the long run."""
    scale = torch.tensor([1e-3] + [1.0] * 7, dtype=torch.float64)[:, None]
    moves = []
    for kind in (Muon, NorMuon):
        w = Parameter(torch.zeros(8, 4, dtype=torch.float64))
        rows = stepped(kind(lr=0.1).build([("w", w)]), w, [scale * g for g in gradients((8, 4))]).norm(dim=1)
        moves.append(float(rows[0] / rows[1:].mean()))
    assert moves[1] > 3 * moves[0]


def test_schedule_free_is_the_papers() -> None:
    """x, y and z as the paper has them, with momentum taken out of the steps."""
    start = torch.randn(5, dtype=torch.float64)
    w = Parameter(start.clone())
    optimizer = ScheduleFree([w], 0.05, (0.8, 0.95), 1e-8, weight_decay=0.1)
    rates = [0.05 * min(1, (t + 1) / 5) for t in range(STEPS)]
    x, z, v, total = start.clone(), start.clone(), torch.zeros_like(start), 0.0
    for t, g in enumerate(gradients((5,))):
        y = 0.2 * z + 0.8 * x
        torch.testing.assert_close(w.detach(), y, rtol=1e-9, atol=1e-11)
        optimizer.param_groups[0]["lr"] = rates[t]
        stepped(optimizer, w, [g])
        v = 0.95 * v + 0.05 * g * g
        z = z - rates[t] * (g / ((v / (1 - 0.95 ** (t + 1))).sqrt() + 1e-8) + 0.1 * y)
        weight = max(rates[: t + 1]) ** 2
        total += weight
        x = (1 - weight / total) * x + weight / total * z
        torch.testing.assert_close(optimizer.evaluation_weights()[w], x, rtol=1e-9, atol=1e-11)


def test_schedule_free_is_the_authors_library() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    start = torch.randn(5, dtype=torch.float64)
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    own = ScheduleFree([ours], 0.05, (0.9, 0.99), weight_decay=0.1)
    other = schedulefree.AdamWScheduleFree([theirs], 0.05, (0.9, 0.99), weight_decay=0.1)
    other.train()
    for gradient in gradients((5,)):
        stepped(own, ours, [gradient])
        stepped(other, theirs, [gradient])
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    other.eval()
    torch.testing.assert_close(own.evaluation_weights()[ours], theirs.detach(), rtol=1e-8, atol=1e-10)


def test_the_trainer_evaluates_the_average_and_gives_it_out() -> None:
    run = trainer("ScheduleFreeAdamW")
    run.fit()
    own = {name: value.clone() for name, value in run.model.state_dict().items()}
    with run.averaged() as model:
        averaged = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(not torch.equal(averaged[name], own[name]) for name in own)
    assert all(torch.equal(value, own[name]) for name, value in run.model.state_dict().items())
    with pytest.raises(PlanError, match=r"ScheduleFreeAdamW and EMA.* both own the evaluation weights"):
        trainer("ScheduleFreeAdamW", methods=[EMA()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NorMuon(lr=0.1, eps=0.0), "eps=0.0"),
        (lambda: NorMuon(lr=0.1, beta2=1.0), "betas in"),
        (lambda: NorMuon(lr=-1.0), "learning rate is a number >= 0"),
        (lambda: Sophia(lr=0.1, num_labels=0), "num_labels=0"),
        (lambda: Sophia(lr=0.1, num_labels=1, gamma=float("nan")), "gamma=nan"),
        (lambda: ScheduleFreeAdamW(lr=0.1, betas=(0.0, 0.9)), "nothing is averaged"),
        (lambda: ScheduleFreeAdamW(lr=0.1, weight_decay=-1.0), "weight_decay"),
    ],
)
def test_refuses(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
