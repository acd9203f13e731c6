"""Monitors with models, losses and settings of other people's kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cosmati import InMemory, Loss, Observer, RunConfig, StepOutcome, Trainer
from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import BatchError, RunError
from cosmati.methods import SAM, GradientClipping
from cosmati.train.observers import EarlyStopping, WatchedRun
from cosmati.train.observers.monitors import (
    ActivationStatistics,
    EstimatedEnd,
    GradientNorms,
    LossHealth,
    MemoryUse,
    Monitors,
    Throughput,
    UpdateNorms,
    flops_per_row,
)
from cosmati.train.profiling import profiled
from tests.train.hand_made import outcome
from tests.train.test_watching import ROWS, make, squared_error

TARGETS = ROWS.sum(1, keepdim=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.b.weight = self.a.weight
        self.c.bias.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.c(self.b(self.a(rows)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 1, dtype=torch.complex64)), nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.to(torch.complex64) @ self.a).abs() + self.b(rows)


class ByHand(Observer):
    """Norms by part in float64, parameter by parameter: gradients as optimizers get them, and what the step changed."""

    def on_open(self, run: WatchedRun) -> None:
        self.run = run
        self.rows: list[dict[str, float]] = []
        self.found: list[Mapping[str, float]] = []
        self._hook = register_optimizer_step_pre_hook(self._see)

    def _see(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            self.gradients[id(parameter)] = parameter.grad.clone()

    def on_step_begin(self, clock: Clock) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.before = {name: p.detach().clone() for name, p in self.run.model.named_parameters()}

    def on_step(self, outcome: StepOutcome) -> None:
        squares: dict[str, float] = {}
        for name, parameter in self.run.model.named_parameters():
            own = {"update_norm": parameter.detach() - self.before[name]} if parameter.requires_grad else {}
            if id(parameter) in self.gradients:
                own["gradient_norm"] = self.gradients[id(parameter)]
            for what, tensor in own.items():
                key = f"{what}/{name.split('.')[0]}"
                squares[key] = squares.get(key, 0.0) + sum(abs(v) ** 2 for v in tensor.reshape(-1).tolist())
        self.rows.append({key: math.sqrt(square) for key, square in squares.items()})

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        self.found.append({name: value for name, value in values.items() if not name.startswith("weight")})

    def on_end(self, clock: Clock, ended: str) -> None:
        self._hook.remove()


def half(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = list(model.parameters())
    return [torch.optim.SGD(own[:2], lr=0.05), torch.optim.Adam(own[2:], lr=0.01)]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied and frozen": (Tied, {}),
    "double": (lambda: plain().double(), {}),
    "half the width": (lambda: plain().bfloat16(), {}),
    "complex": (Complex, {}),
    "two optimizers": (plain, {"optimizers": half}),
    "clipped": (plain, {"methods": [GradientClipping(clipping_type="norm", clipping_threshold=0.01)]}),
    "sharpness": (plain, {"methods": [SAM()]}),
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_norms_are_those_of_each_parameter_by_hand(case: str, num_microbatches: int) -> None:
    make_model, given = CASES[case]
    torch.manual_seed(0)
    model, by_hand = make_model(), ByHand()
    kind = next(model.parameters()).dtype
    kind = torch.float32 if kind.is_complex else kind
    trainer = Trainer(
        model,
        squared_error,
        InMemory((ROWS.to(kind), TARGETS.to(kind)), 4),
        optimizers=given.get("optimizers", lambda m: [torch.optim.SGD(m.parameters(), lr=0.05)])(model),
        methods=given.get("methods", ()),
        observers=[Monitors([GradientNorms(), UpdateNorms()], every=1), by_hand],
        config=RunConfig(budget="3ba", num_microbatches=num_microbatches),
    )
    trainer.fit()
    assert len(by_hand.found) == len(by_hand.rows) == 3
    for mine, theirs in zip(by_hand.found, by_hand.rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2 if kind is torch.bfloat16 else 1e-5)


def test_a_health_that_has_watched_another_run_begins_anew() -> None:
    health = LossHealth()
    for _ in range(2):
        make(None, Monitors([health], every=4)).fit()
        assert len(health.state_dict()["window"]) == 12


def test_a_run_that_goes_on_in_one_process_counts_no_loss_twice(tmp_path: Path) -> None:
    class Stop(Observer):
        def on_open(self, run: WatchedRun) -> None:
            self.run = run

        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == 6:
                self.run.stop("for now")

    health = LossHealth()
    trainer = make(tmp_path, Monitors([health], every=3), Stop())
    trainer.fit()
    trainer.fit()
    assert len(health.state_dict()["window"]) == 12


def test_two_monitors_of_a_class_keep_a_state_each() -> None:
    one, other = LossHealth(window=20), LossHealth(window=50)
    both = Monitors([one, other])
    one.load_state_dict({"window": [1.0], "counts": {"loss_spikes": 1}, "waiting": []})
    again = Monitors([LossHealth(window=20), LossHealth(window=50)])
    again.load_state_dict(both.state_dict())
    assert [m.state_dict()["window"] for m in again.monitors] == [[1.0], []]


def test_one_monitor_needs_no_list() -> None:
    health = LossHealth()
    assert Monitors(health).monitors == (health,)


@pytest.mark.parametrize("odd", [LossHealth, EarlyStopping("x", higher_is_better=True), "norms"])
def test_what_is_no_monitor_is_named(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"is no Monitor: give instances.*An observer goes to the trainer"):
        Monitors([odd])


@pytest.mark.parametrize(
    "wrong", [{"flops_per_row": math.nan}, {"flops_per_row": 1.0, "peak_flops_per_second": math.inf}]
)
def test_flops_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Throughput(**wrong)


def test_deviations_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        LossHealth(deviations=math.nan)


class Scaled(nn.Module):
    """A loss with a parameter of its own, which changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
        data[0].mul_(2)
        error = squared_error(model, data) * self.scale
        return {"loss": Loss(error * 4, torch.tensor(4.0)), "logits": None}


def test_flops_are_counted_for_every_kind_of_loss_and_leave_no_trace() -> None:
    model, loss, batch = nn.Linear(3, 1), Scaled(), (ROWS[:4].clone(), TARGETS[:4])
    with torch.no_grad():
        assert flops_per_row(model, loss, batch) == 2 * 3 + 2 * 3
    assert torch.equal(batch[0], ROWS[:4])
    assert model.weight.grad is None
    assert loss.scale.grad is None


def test_flops_of_no_row_are_refused() -> None:
    with pytest.raises(BatchError, match="without rows"):
        flops_per_row(nn.Linear(3, 1), squared_error, (ROWS[:0], TARGETS[:0]))


def test_a_profile_that_has_no_folder_is_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")

    def trains(_: object) -> Trainer:
        raise AssertionError

    with pytest.raises(RunError, match=r"profile can't be made .*--out"):
        profiled(trains, tmp_path / "profile")
    with pytest.raises(RunError, match="at least 1, and whole"):
        profiled(trains, tmp_path / "other", num_steps=2.5)  # type: ignore[arg-type]


def spikes(window: list[float], new: list[float]) -> float:
    health = LossHealth(window=100)
    health.load_state_dict({"window": window, "counts": {"loss_spikes": 0}, "waiting": []})
    return health.judge({"losses": new}, outcome(1))["loss_spikes"]


def test_a_spike_is_eight_robust_deviations_above_the_median() -> None:
    window = [1.0, 2.0, 3.0, 4.0, 5.0] * 4  # its median is 3, the median of the deviations 1
    bound = 3.0 + 8 * 1.4826
    assert spikes(window, [bound - 0.01, bound + 0.01]) == 1
    assert spikes(window[:19], [100.0]) == 0, "it waits for twenty"
    assert spikes([3.0] * 20, [3.0029, 3.0031]) == 1, "by a thousandth at least, where none deviates"


def test_before_any_progress_no_end_is_told() -> None:
    end = EstimatedEnd()
    end.start(Clock(), Budget(Time.parse("10ba"), None))
    assert end.measure(outcome(0)._replace(clock=Clock())) == {"progress": 0.0}


def test_what_a_layer_puts_out_is_seen_before_the_next_one_changes_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(-1.0)
        model[0].bias.fill_(-1.0)
    found: list[Mapping[str, float]] = []

    class Listens(Observer):
        def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
            found.append(values)

    watching = [Monitors([ActivationStatistics()], every=1), Listens()]
    optimizers, config = [torch.optim.SGD(model.parameters(), lr=0.0)], RunConfig(budget="1ba")
    Trainer(
        model, squared_error, InMemory((ROWS, TARGETS), 4), optimizers=optimizers, observers=watching, config=config
    ).fit()
    assert found[0]["activation/0/zeros"] == 0.0
    assert found[0]["activation/0/max"] >= 1.0
    assert found[0]["activation/1/zeros"] == 1.0


def test_memory_is_that_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    use, told = MemoryUse(), {"allocated_bytes.all.current": 3, "num_alloc_retries": 1}
    use._devices, use._last = [torch.device("cuda", 0), torch.device("cuda", 1)], -math.inf
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: told)
    found = use.measure(outcome(1))
    assert (found["device_memory_bytes"], found["device_memory_retries"]) == (6.0, 2.0)
