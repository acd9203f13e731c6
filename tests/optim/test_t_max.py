"""A decay that ends before the run, or after it, against Composer's formulas and PyTorch's schedulers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.later import told_fields
from cosmati.errors import PlanError
from cosmati.optim import Cosine, Linear, Polynomial, Schedule
from cosmati.study.checks import _ends_at_zero

STEPS = 50


def run(schedule: Schedule, ratio: float = 1.0) -> list[float]:
    length = Budget(Time.parse(f"{STEPS}ba"), ratio=ratio)
    assert length.num_steps is not None
    return [schedule.multiplier(length.elapsed(Clock(step=step)), length) for step in range(length.num_steps)]


def torch_run(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], lr: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def composer(kind: str, step: int, t_max: float, final: float, power: float = 1.0) -> float:
    """What Composer's documentation says of a scheduler with `t_max` and `alpha_f`, at a step."""
    tau = min(1.0, step / t_max)
    if kind == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * tau)) / 2
    return final + (1 - final) * (1 - tau) ** power


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize(("t_max", "steps"), [("40ba", 40), ("0.8dur", 40), ("0.5dur", 25), ("80ba", 80), ("1dur", 50)])
def test_composers_schedulers(t_max: str, steps: int, final: float) -> None:
    found = {
        "cosine": run(Cosine(t_max=t_max, final=final)),
        "linear": run(Linear(t_max=t_max, final=final)),
        "polynomial": run(Polynomial(t_max=t_max, final=final, power=3.0)),
    }
    for kind, rates in found.items():
        power = 3.0 if kind == "polynomial" else 1.0
        expected = [composer(kind, step, steps, final, power) for step in range(STEPS)]
        assert rates == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_pytorchs_schedulers() -> None:
    lr, floor = 0.3, 0.03
    theirs = torch_run(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=floor), lr)
    ours = [lr * rate for rate in run(Cosine(t_max="40ba", final=floor / lr))]
    assert ours[:41] == pytest.approx(theirs[:41], rel=1e-9)
    assert ours[41:] == pytest.approx([floor] * 9), "PyTorch's climbs again here; ours and Composer's stay"
    theirs = torch_run(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=30), lr)
    assert [lr * rate for rate in run(Linear(t_max="30ba", final=0.2))] == pytest.approx(theirs, rel=1e-9)
    theirs = torch_run(lambda o: lr_scheduler.PolynomialLR(o, 30, 2.0), lr)
    assert [lr * rate for rate in run(Polynomial(t_max="30ba"))] == pytest.approx(theirs, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("kind", [Linear, Cosine, Polynomial])
def test_warm_up_then_decay_between_its_end_and_t_max(kind: type[Cosine]) -> None:
    """Composer's CosineAnnealingWithWarmupScheduler; a step of warm-up is counted by where it ends, so none rests."""
    rates = run(kind(warmup="10ba", t_max="40ba", final=0.1))
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    powers = {"Linear": 1.0, "Polynomial": 2.0}
    for step in range(9, STEPS):
        name = "cosine" if kind is Cosine else "line"
        expected = composer(name, step - 9, 40 - 9, 0.1, powers.get(kind.__name__, 1.0))
        assert rates[step] == pytest.approx(expected, rel=1e-9)


def test_it_dilates_with_the_run() -> None:
    assert run(Cosine(t_max="40ba"), ratio=2.0)[::2] == pytest.approx(run(Cosine(t_max="40ba")))


@pytest.mark.parametrize("kind", [Linear, Cosine, Polynomial])
def test_the_whole_run_is_told_as_before(kind: type[Cosine]) -> None:
    assert "t_max" not in repr(kind(warmup="1ep", final=0.1))
    assert "t_max" not in told_fields(kind())
    assert repr(kind(t_max="2ep")) != repr(kind())
    assert eval(repr(kind(t_max="2ep", final=0.1))) == kind(t_max="2ep", final=0.1)


@pytest.mark.parametrize("t_max", ["0ba", "0dur", "80%", ""])
def test_what_is_no_end_of_a_decay(t_max: str) -> None:
    with pytest.raises(PlanError, match=r"t_max=.*Give a time > 0|not a time.*'0\.3dur' a fraction"):
        Cosine(t_max=t_max)


@pytest.mark.parametrize("t_max", ["10ba", "0.1dur"])
def test_a_warm_up_that_outlasts_the_decay(t_max: str) -> None:
    with pytest.raises(PlanError, match=r"Warm-up '10ba' isn't over at t_max=.*Shorten the one, or lengthen"):
        run(Cosine(warmup="10ba", t_max=t_max))


def test_a_studys_checklist_sees_an_unfinished_decay() -> None:
    assert _ends_at_zero("Cosine", "warmup='0ba', t_max='0.9dur', final=0.0")
    assert _ends_at_zero("Cosine", "warmup='0ba', final=0.0")
    assert not _ends_at_zero("Cosine", "warmup='0ba', t_max='1.5dur', final=0.0")
    assert not _ends_at_zero("Cosine", "warmup='0ba', t_max='100ba', final=0.0")
