"""Monitors measure what a loop by hand would, keep what they need, and leave no trace in the run."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import InMemory, RunConfig, StepOutcome, Trainer, load_policy, software_licences
from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import PlanError
from cosmati.train.observers import EarlyStopping, Threshold
from cosmati.train.observers.monitors import (
    ActivationStatistics,
    EstimatedEnd,
    GradientNorms,
    LearningRates,
    LossHealth,
    MemoryUse,
    Monitor,
    Monitors,
    SystemLoad,
    Throughput,
    UpdateNorms,
    all_monitors,
    flops_per_row,
)
from tests.train.hand_made import outcome
from tests.train.test_watching import ROWS, Listener, Recorder, make, squared_error, weights


def watched(*monitors: Monitor, every: int = 1, budget: str = "3ba", **config: Any) -> Sequence[Mapping[str, float]]:
    listener = Listener()
    make(None, Monitors(monitors, every=every), listener, budget=budget, **config).fit()
    return [values for _, values in listener.values]


class ByHand(torch.optim.SGD):
    """Writes down, at each step, the gradients that it's given, the change that it makes, and the weights after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[dict[str, float]] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        old, gradients = ([t.detach().clone() for t in own] for own in (parameters, [p.grad for p in parameters]))
        super().step()
        row = {}
        for name, first in (("0", 0), ("2", 2)):
            gradient, change, weight = (
                torch.cat([t.reshape(-1) for t in own[first : first + 2]])
                for own in (
                    gradients,
                    [p.detach() - o for p, o in zip(parameters, old, strict=True)],
                    [p.detach() for p in parameters],
                )
            )
            own = {"gradient_norm": gradient, "update_norm": change, "weight_norm": weight}
            row |= {f"{what}/{name}": math.sqrt(float((value**2).sum())) for what, value in own.items()}
        self.rows.append(row)


@pytest.mark.parametrize("config", [{}, {"num_microbatches": 2}], ids=["short road", "two microbatches"])
def test_norms_are_those_of_a_loop_by_hand(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer, listener = ByHand(model.parameters(), lr=0.05), Listener()
    observers = [Monitors([GradientNorms(), UpdateNorms()], every=1), listener]
    data = InMemory((ROWS, ROWS.sum(1, keepdim=True)), 4)
    run = RunConfig(budget="3ba", **config)
    Trainer(model, squared_error, data, optimizers=[optimizer], observers=observers, config=run).fit()
    found = [values for _, values in listener.values]
    assert len(found) == 3
    assert "weight_norm/0" in found[0]
    for mine, theirs in zip(found, optimizer.rows, strict=True):
        theirs = {name: value for name, value in theirs.items() if name in mine}  # noqa: PLW2901
        assert len(theirs) == (6 if mine is found[0] else 4)
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_parts_are_those_where_names_first_differ() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(net=nn.Sequential(OrderedDict(body=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))))
    )
    listener = Listener()
    data = InMemory((ROWS, ROWS.sum(1, keepdim=True)), 4)
    run, observers = RunConfig(budget="1ba"), [Monitors([GradientNorms()], every=1), listener]
    Trainer(
        model, squared_error, data, optimizers=[torch.optim.SGD(model.parameters())], observers=observers, config=run
    ).fit()
    ((_, found),) = listener.values
    assert {"gradient_norm/net.body.0", "gradient_norm/net.body.1"} == found.keys()


def test_regions_of_a_policy_name_the_norms() -> None:
    names = software_licences().classes
    policy = load_policy("""
version: 1
taxonomy: software-licences
regions:
  low: {params: ["0.*"]}
  high: {params: ["*"], exclude: ["0.*"]}
rules:
  - {class: "open/**", weight: 1}
""")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    listener = Listener()
    ids = torch.full((16,), names.index("open/permissive"))
    data = InMemory((ROWS, ROWS.sum(1, keepdim=True)), 4, class_ids=ids, class_names=names)
    Trainer(
        model,
        squared_error,
        data,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)],
        policy=policy,
        taxonomy=software_licences(),
        observers=[Monitors([GradientNorms()], every=2), listener],
        config=RunConfig(budget="2ba", num_microbatches=2),
    ).fit()
    assert set(listener.values[0][1]) == {"gradient_norm/low", "gradient_norm/high"}


def test_activations_are_those_that_the_layers_put_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    rows = ROWS[:4]
    listener = Listener()
    trainer = Trainer(
        model,
        squared_error,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)],
        observers=[Monitors([ActivationStatistics()], every=1), listener],
        config=RunConfig(budget="1ba"),
    )
    with torch.no_grad():
        hidden = model[0](rows)
        put_out = {"0": hidden, "1": hidden.relu(), "2": model[2](hidden.relu())}
    with trainer:
        trainer.step((rows, rows.sum(1, keepdim=True)))
    expected = {}
    for name, value in put_out.items():
        expected[f"activation/{name}/rms"] = float(value.square().mean().sqrt())
        expected[f"activation/{name}/max"] = float(value.abs().max())
        expected[f"activation/{name}/zeros"] = float((value == 0).float().mean())
    assert listener.values[0][1] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["activation/1/zeros"] < 1


def test_hooks_stand_only_in_measured_steps_and_not_after_a_failure() -> None:
    hooks = nn.modules.module._global_forward_hooks

    class Looks(Recorder):
        def on_step(self, outcome: StepOutcome) -> None:
            self.told.append(("hooks", len(hooks)))

        def on_step_begin(self, clock: Clock) -> None:
            self.told.append(("hooks", len(hooks)))

    looks = Looks()
    make(None, Monitors([ActivationStatistics(every=1)], every=3), looks, budget="6ba").fit()
    assert [count for _, count in looks.told] == [0, 0, 0, 0, 1, 0] * 2

    def breaks(model: nn.Module, data: Any) -> torch.Tensor:
        raise ZeroDivisionError

    model = nn.Linear(3, 1)
    trainer = Trainer(
        model,
        breaks,
        [ROWS],
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        observers=[Monitors([ActivationStatistics()], every=1)],
        config=RunConfig(budget="2ba"),
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert not hooks


def test_a_compiled_model_is_not_looked_into(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ActivationStatistics()
    model = nn.Sequential(nn.Linear(3, 4))
    model[0]._compiled_call_impl = model[0]._call_impl  # as compile() leaves it, which brings Inductor
    monitor.open(type("Run", (), {"model": model})())
    monitor.before(Clock(), 1)
    assert not nn.modules.module._global_forward_hooks
    assert "compiled" in caplog.text


def test_all_monitors_change_no_bits_and_publish_one_line_each(tmp_path: Path) -> None:
    make(tmp_path / "bare", budget="24ba").fit()
    make(tmp_path / "run", all_monitors(every=4), budget="24ba").fit()
    assert [p.read_bytes() for p in weights(tmp_path / "run")] == [p.read_bytes() for p in weights(tmp_path / "bare")]
    lines = [json.loads(line) for line in (tmp_path / "run/monitors.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 24]
    names = set(lines[-1])
    assert lines[0]["memory_bytes"] > 0, "which is asked for every five seconds"
    for name in ("learning_rate/0", "gradient_norm/0", "update_norm/2", "rows_per_second", "progress"):
        assert name in names
    assert [line["step"] for line in lines if "activation/1/zeros" in line] == [4, 24]
    assert [line["step"] for line in lines if "weight_norm/0" in line] == [4]
    for name in ("learning_rate/0", "loss_mean"):
        assert name in names
    assert lines[-1]["progress"] == 1.0
    assert lines[-1]["learning_rate/0"] == 0.05


@pytest.mark.long
def test_health_goes_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    whole, parts = Listener(), Listener()
    make(tmp_path / "whole", Monitors([LossHealth()], every=4), whole, budget="40ba").fit()
    stopper = Recorder(stop_at=26)
    make(tmp_path / "run", Monitors([LossHealth()], every=4), parts, stopper, budget="40ba").fit()
    make(tmp_path / "run", Monitors([LossHealth()], every=4), parts, Recorder(), budget="40ba").fit()
    assert parts.values == whole.values


def losses(monitor: LossHealth, values: Sequence[float]) -> Mapping[str, float]:
    judged: Mapping[str, float] = {}
    for step, value in enumerate(values):
        now = outcome(step, loss=value)
        monitor.note(now)
        if (step + 1) % 4 == 0:
            judged = monitor.judge({"losses": monitor.measure(now)["losses"].tolist()}, now)  # type: ignore[union-attr]
    return judged


def test_spikes_are_counted_and_slopes_are_not() -> None:
    falling = [2.0 * 0.99**step for step in range(60)]
    assert losses(LossHealth(), falling)["loss_spikes"] == 0
    spiky = [*falling, 9.0, 1.0, math.nan, 8.0]
    found = losses(LossHealth(), spiky)
    assert (found["loss_spikes"], found["losses_not_finite"]) == (2, 1)
    assert found["loss_mean"] == 6.0, "of 9, 1 and 8"
    assert losses(LossHealth(), [5.0, 1.0, 9.0, 90.0])["loss_spikes"] == 0, "there's nothing to compare with yet"


def test_a_step_that_was_left_out_is_counted() -> None:
    monitor = LossHealth()
    monitor.note(outcome(0, loss=math.nan)._replace(left_out="the loss is nan"))
    assert monitor.judge({}, outcome(0)) == {"loss_spikes": 0, "losses_not_finite": 0, "steps_left_out": 1}


def test_rates_and_the_end_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = Throughput(flops_per_row=1e6, peak_flops_per_second=1e9)
    speed.start(Clock(step=10, rows=40, tokens=400, seconds=2.0), Budget(Time.parse("20ba")))
    found = speed.measure(outcome(14, clock=Clock(step=15, rows=60, tokens=600, seconds=4.0)))
    assert found == {
        "steps_per_second": 2.5,
        "rows_per_second": 10.0,
        "tokens_per_second": 100.0,
        "flops_per_second": 1e7,
        "model_flops_utilization": 0.01,
    }
    assert speed.measure(outcome(15, clock=Clock(step=16, rows=64, tokens=640, seconds=4.0))) == {}, (
        "no time has passed"
    )
    assert Monitor().measure(outcome(0)) == {}
    ticks = iter([100.0, 130.0])
    monkeypatch.setattr("cosmati.train.observers.monitors.speed.monotonic", lambda: next(ticks))
    end = EstimatedEnd()
    end.start(Clock(step=5), Budget(Time.parse("20ba")))
    # 5 of 20 steps in 30 s, and 10 are left.
    assert end.measure(outcome(9, clock=Clock(step=10))) == {"progress": 0.5, "remaining_seconds": 60.0}


def test_the_flops_of_a_row_are_those_of_its_products() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False))
    data = (ROWS[:4], ROWS[:4].sum(1, keepdim=True))
    before = [p.clone() for p in model.parameters()]
    # Forward 2 x 12 + 2 x 4; backward by the weights as much, by the activations of the second layer only.
    assert flops_per_row(model, squared_error, data) == 2 * (12 + 4) + 2 * (12 + 4) + 2 * 4
    assert all(
        torch.equal(one, other) and other.grad is None for one, other in zip(before, model.parameters(), strict=True)
    )


def test_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = torch.ones(4_000_000)  # 16 MB
    monkeypatch.setattr("cosmati.train.observers.monitors.machine._PAUSE", 0.0)
    (found,) = watched(MemoryUse(), SystemLoad(), LearningRates(), budget="1ba")
    assert found["memory_bytes"] > ballast.nbytes
    assert 0 < found["busy_processors"] < 256
    assert found["available_memory_bytes"] > 0
    assert not [name for name in found if name.startswith("device_")], "there is none"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Monitors([], every=0),
        lambda: LossHealth(window=3),
        lambda: LossHealth(deviations=0),
        lambda: Throughput(flops_per_row=0),
        lambda: ActivationStatistics(every=0),
        lambda: Throughput(peak_flops_per_second=1e12),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="="):
        wrong()


def evaluated(observer: EarlyStopping, values: Sequence[float]) -> list[str]:
    reasons: list[str] = []
    observer.on_open(type("Run", (), {"stop": staticmethod(reasons.append)})())  # type: ignore[arg-type]
    for index, value in enumerate(values):
        observer.on_evaluation(Clock(step=10 * index), {"accuracy": value}, 0.0)
    return reasons


def test_patience_counts_evaluations_without_a_better_one() -> None:
    up = EarlyStopping("accuracy", higher_is_better=True, patience=2, min_delta=0.01)
    assert evaluated(up, [0.5, 0.6, 0.605, 0.62, 0.625]) == []
    assert evaluated(up, [math.nan]) == [
        "accuracy was 0.62 after step 30, and none of 2 evaluations since is better by more than 0.01"
    ]
    down = EarlyStopping("accuracy", higher_is_better=False, patience=1)
    assert evaluated(down, [0.5, 0.4]) == []
    assert len(evaluated(down, [0.4])) == 1


@pytest.mark.parametrize("other", [{"metric": "error"}, {"higher_is_better": False}])
def test_early_stopping_that_goes_on_with_another_metric_begins_anew(other: dict[str, Any]) -> None:
    """Also where it has watched something already."""
    first = EarlyStopping("accuracy", higher_is_better=True, patience=2)
    evaluated(first, [0.5, 0.6, 0.55])
    state = dict(first.state_dict())
    assert (first.best, first.best_step, first.num_worse) == (0.6, 10, 1)
    later = EarlyStopping("accuracy", higher_is_better=True, patience=2)
    evaluated(later, [0.9, 0.8])
    later.load_state_dict(state)
    assert (later.best, later.best_step, later.num_worse) == (0.6, 10, 1)
    later.load_state_dict(state | other)
    assert (later.best, later.num_worse) == (None, 0)


def test_early_stopping_ends_the_run_and_stays_stopped(tmp_path: Path) -> None:
    def stopping(patience: int) -> EarlyStopping:
        return EarlyStopping("error", higher_is_better=True, patience=patience)

    # The error falls, which is no better.
    result = make(tmp_path, stopping(2), budget="30ba", evaluate_every="3ba").fit()
    assert (result.outcome, result.clock.step) == ("stopped", 9)
    assert result.reason.startswith("error was")
    again = make(tmp_path, stopping(2), budget="30ba", evaluate_every="3ba").fit()
    assert (again.outcome, again.clock.step, again.reason) == ("stopped", 9, result.reason)
    longer = make(tmp_path, stopping(4), budget="30ba", evaluate_every="3ba").fit()
    assert longer.clock.step == 15


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"watches 'acuracy', and the evaluation measures error\. Name one"):
        make(None, EarlyStopping("acuracy", higher_is_better=True), evaluate_every="2ba").fit()


def test_a_threshold_on_a_metric_or_on_what_a_monitor_measures() -> None:
    result = make(None, Threshold("error", below=10.0), evaluate_every="2ba").fit()
    assert (result.clock.step, result.outcome) == (2, "stopped")
    assert "10 was enough" in result.reason
    observers = (Monitors([EstimatedEnd()], every=1), Threshold("progress", above=0.5))
    assert make(None, *observers, budget="12ba").fit().clock.step == 6
    with pytest.raises(PlanError, match="one of both bounds"):
        Threshold("error")
