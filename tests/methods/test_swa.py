"""SWA against a plain mean of copies, its learning rate against the formula by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position, State
from cosmati.errors import PlanError
from cosmati.methods import EMA, SWA
from cosmati.optim import SGD, Constant, Cosine, Linear
from cosmati.testing.pieces import weights_of
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer


def budget(span: str = "100ba", **facts: Any) -> Budget:
    return Budget(Time.parse(span), **facts)


def walk(method: SWA, num_steps: int, span: Budget, learnt: dict[int, frozenset[str]] | None = None) -> Any:
    """Move a model at random, and return the state with the weights after each step, float64."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    state: State = {}
    path: list[dict[str, Tensor]] = []
    for step in range(1, num_steps + 1):
        moving = (learnt or {}).get(step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if moving is None or name in moving:
                    parameter.add_(torch.randn_like(parameter))
        path.append({name: p.detach().double().clone() for name, p in model.named_parameters()})
        at = Position(Clock(step=step), span, 0, 0, model, Classification(2))
        state = method.after(state, weights_of(model), at, moving)
    return method.evaluation_weights(state, at), path


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 20), length=st.integers(1, 20), interval=st.integers(1, 7))
def test_is_the_mean_of_the_weights_at_its_moments(start: int, length: int, interval: int) -> None:
    method = SWA(swa_start=f"{start}ba", swa_end=f"{start + length}ba", update_interval=f"{interval}ba")
    weights, path = walk(method, 40, budget("40ba"))
    moments = [step for step in range(1, 41) if step % interval == 0 and start <= step <= start + length]
    if not moments:
        assert weights is None
        return
    for name, value in weights.items():
        expected = torch.stack([path[step - 1][name] for step in moments]).mean(0)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_parameter_that_did_not_move_is_left_out() -> None:
    learnt = {step: frozenset({"weight"}) for step in range(3, 9)}
    method = SWA(swa_start="0ba", swa_end="8ba", update_interval="2ba")
    weights, path = walk(method, 8, budget("8ba"), learnt)
    torch.testing.assert_close(weights["bias"].double(), path[1]["bias"], rtol=1e-6, atol=1e-6)
    expected = torch.stack([path[step]["weight"] for step in (1, 3, 5, 7)]).mean(0)
    torch.testing.assert_close(weights["weight"].double(), expected, rtol=1e-5, atol=1e-5)


def test_times_dilate_with_the_run() -> None:
    method = SWA(swa_start="4ba", swa_end="8ba", update_interval="2ba")
    weights, path = walk(method, 20, budget("10ba", ratio=2.0))
    expected = torch.stack([path[step - 1]["weight"] for step in (8, 12, 16)]).mean(0)
    torch.testing.assert_close(weights["weight"].double(), expected, rtol=1e-5, atol=1e-5)


def test_epochs_are_known_from_the_data() -> None:
    method = SWA(swa_start="0.5dur", swa_end="1dur")
    weights, path = walk(method, 12, budget("4ep", steps_per_epoch=3))
    expected = torch.stack([path[step - 1]["weight"] for step in (6, 9, 12)]).mean(0)
    torch.testing.assert_close(weights["weight"].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(PlanError, match="can't be placed"):
        walk(method, 12, budget("12ba"))


@pytest.mark.parametrize("strategy", ["linear", "cos"])
@pytest.mark.parametrize("rate", [None, 0.3])
@pytest.mark.parametrize("elapsed", [0.0, 0.49, 0.5, 0.55, 0.6, 0.9, 1.0])
def test_learning_rate_goes_from_the_schedule_to_its_own(strategy: Any, rate: float | None, elapsed: float) -> None:
    method = SWA(
        swa_start="0.5dur",
        swa_end="1dur",
        update_interval="5ba",
        schedule_swa_lr=True,
        anneal_strategy=strategy,
        anneal_steps=4,
        swa_lr=rate,
    )
    found = method.learning_rate(lambda fraction: 2 - fraction, elapsed, budget("100ba"))
    way = min(1.0, max(0.0, (elapsed - 0.5) / 0.2))
    share = way if strategy == "linear" else (1 - math.cos(math.pi * way)) / 2
    assert found == pytest.approx((2 - elapsed) * (1 - share) + (1.5 if rate is None else rate) * share)


class Rates(Observer):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.values: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.values.append(self.trainer.assembly.optimizers[0].optimizer.param_groups[0]["lr"])


def run(*methods: Any, schedule: Any = None, optimizer: Any = None) -> tuple[Trainer, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(10)]
    trainer = Trainer(
        model,
        Classification(3),
        data,
        optimizers=[optimizer(model) if optimizer else SGD(lr=0.5, schedule=schedule or Constant())],
        methods=methods,
        evaluation=Evaluation(data[:2], {"accuracy": accuracy}),
        config=RunConfig(budget="10ba"),
    )
    rates = Rates(trainer)
    trainer.observers.append(rates)
    trainer.fit()
    return trainer, rates.values


def test_the_trainer_follows_its_learning_rate() -> None:
    method = SWA(swa_start="4ba", swa_end="9ba", update_interval="1ba", schedule_swa_lr=True, anneal_steps=2)
    _, rates = run(method, schedule=Linear())
    # Linear from 0.5 at step 0 by 0.05 a step; from step 4 on (0.3) it's held, after half a step of the way.
    assert rates == pytest.approx([0.5, 0.45, 0.4, 0.35, 0.3, 0.25 / 2 + 0.3 / 2, 0.3, 0.3, 0.3, 0.3])
    _, plain = run(SWA(swa_start="4ba", swa_end="9ba", update_interval="1ba"), schedule=Linear())
    _, without = run(schedule=Linear())
    assert plain == without


def test_evaluates_the_mean_and_keeps_the_model_its_own() -> None:
    trainer, _ = run(SWA(swa_start="2ba", swa_end="8ba", update_interval="1ba"), schedule=Cosine())
    plain, _ = run(schedule=Cosine())
    assert all(torch.equal(v, plain.model.state_dict()[n]) for n, v in trainer.model.state_dict().items())
    weights = trainer.plan.methods[0].evaluation_weights(trainer.states[0], trainer.position())
    assert weights is not None
    assert not torch.equal(weights["0.weight"], trainer.model[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swa_start": "0.9dur", "swa_end": "0.5dur"}, "takes no weights"),
        ({"swa_start": "10sec"}, "host's clock"),
        ({"update_interval": "often"}, "is not a time"),
        ({"anneal_strategy": "cosine"}, "Use 'linear' or 'cos'"),
        ({"anneal_steps": -1}, "count of intervals"),
        ({"swa_lr": 0.1}, "schedule_swa_lr=True"),
        ({"schedule_swa_lr": True, "swa_lr": -0.1}, "a number >= 0"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SWA(**options)


def test_refuses_company() -> None:
    with pytest.raises(PlanError, match="both own the evaluation weights"):
        run(SWA(), EMA())
    with pytest.raises(PlanError, match=r"built torch optimizer .* Give configurations instead"):
        run(SWA(schedule_swa_lr=True), optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1))
