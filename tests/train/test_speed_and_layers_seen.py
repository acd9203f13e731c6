"""What monitors of speed, layers and losses tell at the edges: no time, no layer, other losses, and what is copied."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import BatchError
from cosmati.train.observers.monitors import speed
from cosmati.train.observers.monitors.activations import ActivationStatistics
from cosmati.train.observers.monitors.losses import LossHealth, _stacked
from cosmati.train.observers.monitors.speed import EstimatedEnd, Throughput, flops_per_row

BUDGET = Budget(Time.parse("10ba"))


def at(step: int, rows: int = 0, tokens: int = 0, seconds: float = 0.0) -> Any:
    return SimpleNamespace(clock=Clock(step=step, rows=rows, tokens=tokens, seconds=seconds))


def test_rates_without_operations_or_a_peak_are_left_out() -> None:
    for given, more in (
        ({}, {}),
        ({"flops_per_row": 10.0}, {"flops_per_second": 20.0}),
        (
            {"flops_per_row": 10.0, "peak_flops_per_second": 40.0},
            {"flops_per_second": 20.0, "model_flops_utilization": 0.5},
        ),
    ):
        watch = Throughput(**given)
        watch.start(at(2, 4, 6, 1.0).clock, BUDGET)
        rates = {"steps_per_second": 0.5, "rows_per_second": 2.0, "tokens_per_second": 5.0}
        assert watch.measure(at(4, 12, 26, 5.0)) == rates | more


@pytest.mark.parametrize(("tokens", "is_told"), [(0, False), (8, False), (7, True), (9, True)])
def test_tokens_are_told_where_rows_are_sequences(tokens: int, is_told: bool) -> None:
    watch = Throughput()
    watch.start(at(0).clock, BUDGET)
    found = watch.measure(at(1, 8, tokens, 2.0))
    assert found.get("tokens_per_second") == (tokens / 2 if is_told else None)


def test_a_measurement_in_no_time_or_of_a_clock_that_fell_back_tells_nothing_and_counts_on() -> None:
    watch = Throughput()
    watch.start(at(0, seconds=5.0).clock, BUDGET)
    assert watch.measure(at(1, 1, 1, 5.0)) == watch.measure(at(2, 2, 2, 4.0)) == {}
    assert watch.measure(at(4, 4, 4, 6.0)) == {"steps_per_second": 1.0, "rows_per_second": 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops_per_row": 0.0},
        {"flops_per_row": -1.0, "peak_flops_per_second": 1.0},
        {"flops_per_row": math.inf},
        {"flops_per_row": math.nan},
        {"flops_per_row": 1.0, "peak_flops_per_second": 0.0},
        {"flops_per_row": 1.0, "peak_flops_per_second": math.nan},
        {"peak_flops_per_second": 1.0},
    ],
)
def test_rates_that_cannot_be_are_told(wrong: dict[str, float]) -> None:
    shown = {"flops_per_row": None, "peak_flops_per_second": None} | wrong
    with pytest.raises(ValueError, match="both are positive") as caught:
        Throughput(**wrong)
    assert str(caught.value).startswith(f"Throughput({', '.join(f'{key}={value}' for key, value in shown.items())}):")


def test_the_end_is_told_by_the_pace_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr(speed, "monotonic", lambda: now[0])
    watch = EstimatedEnd()
    watch.start(at(2).clock, BUDGET)
    assert watch.measure(at(1)) == {"progress": 0.1}, "before where it was started"
    now[0] = 10.0
    assert watch.measure(at(2)) == {"progress": 0.2}
    assert watch.measure(at(5)) == {"progress": 0.5, "remaining_seconds": pytest.approx(5.0)}


class Counting(nn.Module):
    """A model that counts its calls and draws numbers, with a loss of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        product: Tensor = self.product(rows * torch.rand_like(rows))
        return product

    def loss(self, model: nn.Module, data: Tensor) -> Tensor:
        assert model is self, "both are copied together"
        total: Tensor = model(data).square().mean()
        return total


class Kept:
    """A loss that is no module and no method: it isn't copied."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, Tensor]] = []

    def __call__(self, model: nn.Module, data: Tensor) -> Tensor:
        self.seen.append((model, data))
        total: Tensor = model(data).sum()
        return total


def test_operations_are_counted_on_copies_with_the_generator_where_it_was() -> None:
    model, rows, kept = Counting(), torch.ones(2, 4), Kept()
    before = torch.get_rng_state()
    # A product forward, and one backward by the weights: the rows need no gradient.
    assert flops_per_row(model, model.loss, rows) == flops_per_row(model, kept, rows) == 2 * 2 * 4 * 3
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    [(own_model, own_rows)] = kept.seen
    assert own_model is not model
    assert own_rows is not rows
    with pytest.raises(BatchError, match=r"^flops_per_row\(\) is given a batch without rows"):
        flops_per_row(model, kept, rows[:0])


def test_operations_are_those_of_one_row() -> None:
    model = nn.Linear(4, 3)
    for num in (1, 3, 8):
        assert flops_per_row(model, lambda model, data: model(data).sum(), torch.ones(num, 4)) == 2 * 2 * 4 * 3


class Gives(nn.Module):
    """Puts out what it's told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Any:
        return self.output


def watched(model: nn.Module, *patterns: str, **options: int) -> ActivationStatistics:
    watch = ActivationStatistics(patterns or ("*",), **options)
    watch.open(SimpleNamespace(model=model))  # type: ignore[arg-type]
    return watch


def seen(watch: ActivationStatistics, *models: nn.Module, number: int = 1) -> dict[str, float]:
    watch.before(Clock(), number)
    for model in models:
        model(torch.ones(1))
    found = {name: value.tolist() for name, value in watch.measure(at(1)).items()}  # type: ignore[union-attr]
    watch.end()
    return dict(watch.judge(found, at(1)))


@pytest.mark.parametrize(
    "output",
    [None, (torch.ones(2),), torch.ones(2, dtype=torch.int64), torch.ones(0), torch.ones(3, 0), torch.tensor([True])],
)
def test_outputs_that_are_no_numbers_are_passed_over(output: Any) -> None:
    assert seen(watched(model := Gives(output)), model) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_are_of_what_a_layer_put_out_last(dtype: torch.dtype) -> None:
    for output, rms, most, zeros in (
        (torch.tensor([3.0, -4.0, 0.0, 0.0]), 2.5, 4.0, 0.5),
        (torch.tensor([[-3.0], [-4.0]]), math.sqrt(12.5), 4.0, 0.0),
        (torch.tensor(2.0), 2.0, 2.0, 0.0),
        (torch.zeros(3), 0.0, 0.0, 1.0),
    ):
        model = Gives(torch.full_like(output, 9.0).to(dtype))
        watch = watched(model)
        watch.before(Clock(), 1)
        model(torch.ones(1))
        model.output = output.to(dtype)
        found = seen(watch, model)
        what = {"rms": rms, "max": most, "zeros": zeros}
        assert found == {f"activation/model/{name}": pytest.approx(value, rel=1e-6) for name, value in what.items()}


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((2048,), range(0, 2048, 2)),
        ((3000,), range(0, 2048, 2)),
        ((1024,), range(1024)),
        ((1500,), range(1024)),
        ((4, 512), range(1024)),
        ((3, 1000), range(1000)),
        ((2, 4000), range(0, 3072, 3)),
        ((2048, 1), range(1024)),
    ],
)
def test_a_thousand_numbers_are_taken_evenly_from_the_first_rows(shape: tuple[int, ...], places: range) -> None:
    model = Gives(torch.arange(float(math.prod(shape))).view(shape) + 1)
    watch = watched(model)
    watch.before(Clock(), 1)
    model(torch.ones(1))
    taken = watch._found["model"]
    watch.end()
    assert taken.tolist() == [float(place + 1) for place in places]


def test_layers_of_one_size_and_type_are_measured_together_and_each_has_its_own() -> None:
    outputs = [torch.tensor([1.0, 0.0]), torch.tensor([2.0, 3.0]), torch.ones(3), torch.ones(2, dtype=torch.float64)]
    layers = nn.ModuleList(Gives(one) for one in outputs)
    watch = watched(layers)
    watch.before(Clock(), 1)
    for layer in layers:
        layer(torch.ones(1))
    found = watch.measure(at(1))
    assert [json.loads(names) for names in found] == [["0", "1"], ["2"], ["3"]]
    told = watch.judge({name: value.tolist() for name, value in found.items()}, at(1))  # type: ignore[union-attr]
    watch.end()
    assert [told[f"activation/{n}/max"] for n in range(4)] == [1.0, 3.0, 1.0, 1.0]
    assert [told[f"activation/{n}/zeros"] for n in range(4)] == [0.5, 0.0, 0.0, 0.0]
    assert told["activation/0/rms"] == pytest.approx(math.sqrt(0.5))
    assert len(told) == 12


def test_layers_have_no_children_and_match_a_pattern_and_at_most_eight_are_taken() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Identity() for _ in range(9))), nn.Identity(), nn.Identity())
    for patterns, options, names in (
        ((), {}, ["0.0", "0.1", "0.2", "0.4", "0.5", "0.6", "0.8", "1"]),
        (("1", "2"), {}, ["1", "2"]),
        (("0",), {}, []),
        (("nothing",), {}, []),
        (("0.*",), {"max_layers": 2}, ["0.0", "0.4"]),
    ):
        assert list(watched(model, *patterns, **options)._names.values()) == names


def test_a_hook_is_put_in_place_once_and_what_was_seen_is_let_go() -> None:
    model, hooks = nn.Identity(), nn.modules.module._global_forward_hooks
    before, usual = len(hooks), watched(model)
    for number, num_hooks in ((1, 1), (2, 0), (5, 0), (6, 1), (11, 1)):
        for _ in range(2):
            usual.before(Clock(), number)
            assert len(hooks) - before == num_hooks
        model(torch.ones(2))
        assert bool(usual.measure(at(1))) is bool(num_hooks)
        usual.end()
        usual.end()
        assert (len(hooks), usual.measure(at(1))) == (before, {})
    nothing = watched(model, "nothing", every=1)
    nothing.before(Clock(), 1)
    assert len(hooks) == before


@pytest.mark.parametrize("given", [{"max_layers": 0}, {"every": 0}, {"max_layers": -1, "every": -1}])
def test_numbers_of_layers_and_measurements_are_told(given: dict[str, int]) -> None:
    shown = {"max_layers": 8, "every": 5} | given
    with pytest.raises(ValueError, match="both are at least 1") as caught:
        ActivationStatistics(**given)
    assert f"(max_layers={shown['max_layers']}, every={shown['every']})" in str(caught.value)


def test_losses_of_before_and_after_a_resume_stand_in_a_row() -> None:
    for losses, dtype in (
        ([1.5, torch.tensor(2.0, dtype=torch.float64), 3.0], torch.float64),
        ([torch.tensor(1.5), 2.0, torch.tensor(3.0)], torch.float32),
        ([1.5, 2.0, 3.0], torch.float32),
    ):
        row = _stacked(losses)  # type: ignore[arg-type]
        assert (row.dtype, row.tolist()) == (dtype, [1.5, 2.0, 3.0])


def test_a_state_of_losses_is_its_own() -> None:
    watch = LossHealth(window=20)
    note: Any = SimpleNamespace(loss=torch.tensor(2.0), left_out="", withheld=())
    watch.note(note)
    watch.judge({"losses": [1.0, math.nan, 3.0]}, note)
    watch.note(note)
    state = watch.state_dict()
    counts = {"loss_spikes": 0, "losses_not_finite": 1, "steps_left_out": 0}
    assert state == {"window": [1.0, 3.0], "counts": counts, "waiting": [2.0]}
    again = LossHealth(window=20)
    again.note(note)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.judge({"losses": [math.inf]}, note)
    assert state["counts"] == counts, "what was kept doesn't change"
    assert again.state_dict()["counts"]["losses_not_finite"] == 2
    assert again.state_dict()["waiting"] == []


def test_a_spike_is_above_the_bound_and_a_thousandth_counts_by_its_size() -> None:
    for window, bound in (([2.0] * 20, 2.002), ([-2.0] * 20, -1.998), ([1.0, 3.0] * 10, 2.0 + 8 * 1.4826)):
        watch = LossHealth()
        assert watch._bound() == math.inf
        watch.load_state_dict({"window": window[:19], "counts": {}, "waiting": []})
        assert watch._bound() == math.inf
        watch.load_state_dict({"window": window, "counts": {}, "waiting": []})
        assert watch._bound() == pytest.approx(bound, rel=1e-12)
    with pytest.raises(ValueError, match=r"^LossHealth\(window=19, deviations=8\.0\): at least 20 losses"):
        LossHealth(window=19)
    assert LossHealth()._window.maxlen == 100
