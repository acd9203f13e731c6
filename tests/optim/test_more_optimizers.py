"""NorMuon, Sophia and schedule-free AdamW against the papers' recurrences in float64."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_schedule_free_state_is_loaded_in_its_own_types(dtype: torch.dtype) -> None:
    """PyTorch casts what it loads to the parameter's type, from which other bits would follow."""

    def optimizer(first: Parameter, second: Parameter) -> ScheduleFree:
        return ScheduleFree([{"params": [first]}, {"params": [second], "lr": 0.1}], 0.05)

    all_gradients = [(g[:3].to(dtype), g[3:].to(dtype)) for g in gradients((5,))]
    parameters = [Parameter(torch.ones(n, dtype=dtype)) for n in (3, 2)]
    whole = optimizer(*parameters)
    halfway: dict[str, Any] = {}
    for number, (first, second) in enumerate(all_gradients):
        if number == 7:
            halfway = {"state": whole.state_dict(), "weights": [p.detach().clone() for p in parameters]}
            halfway["state"] = copy.deepcopy(halfway["state"])
        parameters[0].grad, parameters[1].grad = first, second
        whole.step()
    again = [Parameter(weight.clone()) for weight in halfway["weights"]]
    resumed = optimizer(*again)
    resumed.load_state_dict(halfway["state"])
    for first, second in all_gradients[7:]:
        again[0].grad, again[1].grad = first, second
        resumed.step()
    for one, other in zip(parameters, again, strict=True):
        assert torch.equal(one, other)
        for name, value in whole.state[one].items():
            assert torch.equal(value, resumed.state[other][name])
            assert value.dtype == resumed.state[other][name].dtype
        assert torch.equal(whole.evaluation_weights()[one], resumed.evaluation_weights()[other])


def test_schedule_free_moves_from_nothing_at_a_rate_of_zero() -> None:
    w = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = ScheduleFree([w], 0.0, weight_decay=0.5)
    stepped(optimizer, w, gradients((3,))[:2])
    assert w.tolist() == [1, 1, 1]
    assert optimizer.evaluation_weights()[w].tolist() == [1, 1, 1]
    assert optimizer.state[w]["step"] == 2
    assert ScheduleFree([Parameter(torch.ones(1))], 0.1).evaluation_weights() == {}, "nothing was stepped"


def test_sophia_refuses_estimates_that_fit_nothing_and_takes_none_of_them() -> None:
    w, other = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    optimizer = ClippedCurvature([w], 0.1, update_interval=0)
    for wrong in ({other: torch.ones(2)}, {w: torch.ones(3)}, {w: torch.ones(2), other: torch.ones(2)}):
        with pytest.raises(PlanError, match=r"1 estimate\(s\) fit no parameter of this optimizer"):
            optimizer.update_curvature(wrong)
    assert not optimizer.state[w]


def test_sophia_builds_what_it_says() -> None:
    named = [("weight", Parameter(torch.ones(2, 2))), ("bias", Parameter(torch.ones(2)))]
    options: dict[str, Any] = {"betas": (0.8, 0.7), "gamma": 0.3, "num_labels": 5, "update_interval": 2, "eps": 1e-3}
    groups = Sophia(lr=0.3, weight_decay=0.2, decay_vectors=False, **options).build(named).param_groups
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert all(group["lr"] == 0.3 and {key: group[key] for key in options} == options for group in groups)
    own = ScheduleFreeAdamW(lr=0.3, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.2, weight_lr_power=1.0).build(named)
    expected = {"lr": 0.3, "betas": (0.8, 0.7), "eps": 1e-3, "weight_decay": 0.2, "weight_lr_power": 1.0}
    assert {key: own.param_groups[0][key] for key in expected} == expected
    rows = NorMuon(lr=0.3, momentum=0.7, beta2=0.6, eps=1e-3, nesterov=False, weight_decay=0.2, num_iterations=3).build(
        named[:1]
    )
    expected = {"momentum": 0.7, "beta2": 0.6, "eps": 1e-3, "nesterov": False, "weight_decay": 0.2, "num_iterations": 3}
    assert {key: rows.param_groups[0][key] for key in expected} == expected


@pytest.mark.parametrize("edge", [0, 1])
def test_options_at_their_edges(edge: int) -> None:
    """0 is a decay, a rate and an interval; 1 averages nothing for ever, and is none."""
    if not edge:
        Sophia(lr=0, num_labels=1, betas=(0.0, 0.0), weight_decay=0.0, update_interval=0)
        NorMuon(lr=0, beta2=0.0)
        ScheduleFreeAdamW(lr=0, betas=(0.1, 0.0), weight_decay=0.0, eps=0.0, weight_lr_power=0.0)
        return
    for make in (
        lambda: Sophia(lr=0.1, num_labels=1, betas=(0.9, 1.0)),
        lambda: ScheduleFreeAdamW(lr=0.1, betas=(1.0, 0.9)),
        lambda: ScheduleFreeAdamW(lr=0.1, betas=(0.9, 1.0)),
    ):
        with pytest.raises(PlanError, match=r"betas in \[0, 1\)"):
            make()
    for option in ("gamma", "eps"):
        with pytest.raises(PlanError, match=f"{option}=0"):
            Sophia(lr=0.1, num_labels=1, **{option: 0})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="update_interval=-1"):
        Sophia(lr=0.1, num_labels=1, update_interval=-1)
