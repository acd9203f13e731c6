"""A profile names the parts of a step, adds up, and says what bounds it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cosmati import Observer, RunConfig, Trainer
from cosmati.errors import RunError
from cosmati.train.outcome import StepOutcome
from cosmati.train.profiling import PREFIX, StepProfile, _Profiling, profiled
from cosmati.train.timing import Stopwatch
from tests.train.test_watching import squared_error


def trainer_of(budget: str = "40ba", pause: float = 0.0, **config: int) -> Callable[[Sequence[Observer]], Trainer]:
    rows = torch.randn(64, 32)

    def made(observers: Sequence[Observer]) -> Trainer:
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
        data = [(rows, rows.sum(1, keepdim=True))] * 100
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        run = RunConfig(budget=budget, **config)  # type: ignore[arg-type]
        given = Slowly(data, pause) if pause else data
        return Trainer(model, squared_error, given, optimizers=[optimizer], observers=observers, config=run)

    return made


class Slowly:
    def __init__(self, data: Sequence[object], pause: float) -> None:
        self.data, self.pause = data, pause

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[object]:
        for one in self.data:
            time.sleep(self.pause)
            yield one


@pytest.mark.parametrize("config", [{}, {"num_microbatches": 2}], ids=["short road", "two microbatches"])
def test_the_trace_has_the_parts_of_each_step_by_name(config: dict[str, int], tmp_path: Path) -> None:
    found = profiled(trainer_of(**config), tmp_path, warm_up=2, num_steps=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    parts = [event for event in events if str(event.get("name")).startswith(PREFIX)]
    names = {event["name"].removeprefix(PREFIX) for event in parts}
    assert {"data", "forward", "backward", "optimizer", "ledger"} <= names
    per_step = 3 * config.get("num_microbatches", 1)
    assert sum(event["name"] == PREFIX + "forward" for event in parts) == per_step
    (forward, *_) = (event for event in parts if event["name"] == PREFIX + "forward")
    products = [event for event in events if event.get("name") == "aten::addmm"]
    inside = [e for e in products if forward["ts"] <= e["ts"] <= forward["ts"] + forward["dur"]]
    assert len(inside) == 2, "the two linear layers' products, of one forward pass"
    assert found.by_part.keys() >= {"data", "forward", "backward", "optimizer"}
    assert sum(found.by_part.values()) == pytest.approx(found.seconds)
    # 64 rows; forward 2 x (32 x 128 + 128), backward the same by the weights, and by the activations of the second.
    assert found.flops == pytest.approx(64 * (4 * (32 * 128 + 128) + 2 * 128), rel=0.02)
    assert found.device_seconds is None


@pytest.mark.long
def test_waiting_for_rows_is_what_bounds_a_slow_loader(tmp_path: Path) -> None:
    found = profiled(trainer_of(pause=0.1), tmp_path, warm_up=1, num_steps=2)
    assert found.by_part["data"] >= 0.1
    assert found.bound.startswith("data: ")
    assert "Bound by data" in str(found)


def of(device_seconds: float | None, **by_part: float) -> str:
    seconds = sum(by_part.values())
    return StepProfile(
        num_steps=1,
        seconds=seconds,
        by_part=by_part,
        operators=(("aten::mm", 2.0, 0.001),),
        device_seconds=device_seconds,
        flops=1e9,
        files=(),
    ).bound


def test_the_verdict_follows_from_the_shares() -> None:
    assert of(None, data=0.1, forward=0.3, backward=0.6).startswith("backward: 60%")
    assert of(0.95, data=0.1, forward=0.3, backward=0.6).startswith("the device: it runs kernels 95%")
    assert of(0.2, data=0.1, forward=0.3, backward=0.6).startswith("the host: the device is busy 20%")
    assert of(0.7, data=0.1, forward=0.3, backward=0.6).startswith("host and device alike")
    assert of(0.2, data=0.5, forward=0.5).startswith("data: 50%")


def test_the_verdict_is_of_shares_however_long_a_step_takes() -> None:
    assert of(3.8, data=0.4, forward=1.2, backward=2.4).startswith("the device: it runs kernels 95%")
    assert of(0.02, data=0.01, forward=0.03, backward=0.06).startswith("the host: the device is busy 20%")


def test_an_accelerator_is_waited_for_where_a_phase_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two steps that pass, three that are measured, and three under the profiler."""
    waited: list[int] = []
    watch = _Profiling(2, 3)
    watch.stopwatch, watch._is_cuda, steps = Stopwatch(), True, list(range(1, 10))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(step))
    monkeypatch.setattr(watch, "_start", lambda: None)
    monkeypatch.setattr(watch, "_stop", lambda: None)
    watch._run = SimpleNamespace(stop=lambda _why: None)  # type: ignore[assignment]
    for step in steps:
        watch.on_step(SimpleNamespace(clock=SimpleNamespace(step=step, seconds=0.0)))  # type: ignore[arg-type]
    assert waited == [2, 5, 8]


@pytest.mark.parametrize(
    ("devices", "is_waited_for"),
    [
        ((), False),
        (("cpu",), False),
        (("meta", "cpu"), False),
        (("cuda",), True),
        (("cpu", "cuda"), True),
        (("cuda", "cpu"), True),
    ],
)
def test_a_part_of_the_model_on_cuda_is_enough_to_wait_for(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], *, is_waited_for: bool
) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    run = SimpleNamespace(model=SimpleNamespace(parameters=lambda: iter(parameters)))
    watch = _Profiling(1, 1)
    watch.on_open(run)  # type: ignore[arg-type]
    watch._wait()
    assert waited == [True] * is_waited_for
    assert watch._run is run


def test_a_run_that_is_too_short_is_an_error_with_a_mend(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"ended after 4 steps, and a profile takes 25: .*config\.budget=100ba"):
        profiled(trainer_of(budget="4ba"), tmp_path)
    with pytest.raises(RunError, match="both have to be at least 1"):
        profiled(trainer_of(), tmp_path, num_steps=0)
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_run_that_fails_midway_leaves_no_profiler_behind(tmp_path: Path, step: int) -> None:
    """In a step that passes, one that's measured, and one that's profiled."""

    class Fails(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == step:
                raise ZeroDivisionError

    made = trainer_of()
    with pytest.raises(ZeroDivisionError):
        profiled(lambda observers: made([*observers, Fails()]), tmp_path, warm_up=1, num_steps=3)
    assert not torch.autograd.profiler._is_profiler_enabled
    assert list(tmp_path.iterdir()) == []
    assert profiled(made, tmp_path, warm_up=1, num_steps=1).num_steps == 1


@pytest.mark.parametrize("device_seconds", [None, 0.15])
@pytest.mark.parametrize("flops", [None, 3e9])
def test_the_table_as_it_is_printed(device_seconds: float | None, flops: float | None) -> None:
    profile = StepProfile(
        num_steps=4,
        seconds=0.2,
        by_part={"forward": 0.05, "backward": 0.12, "data": 0.03},
        operators=(("aten::mm", 2.5, 0.0015), ("x" * 60, 1.0, 0.25)),
        device_seconds=device_seconds,
        flops=flops,
        files=(),
    )
    expected = [
        "A step takes 200.00 ms (mean of 4, without the profiler)",
        "",
        "part                                    ms    share",
        "backward                           120.000    60.0%",
        "forward                             50.000    25.0%",
        "data                                30.000    15.0%",
        *(["(device, in kernels)               150.000    75.0%"] if device_seconds else []),
        "",
        "operator (under the profiler)                          calls        ms",
        "aten::mm                                                 2.5     1.500",
        f"{'x' * 50}       1.0   250.000",
        "",
        f"Bound by {profile.bound}",
        *(["3.00 GFLOP a step, 15.0 GFLOP/s"] if flops else []),
    ]
    assert str(profile).splitlines() == expected
