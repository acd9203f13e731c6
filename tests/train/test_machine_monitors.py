"""What monitors tell of the machine and of speed, against the plain quotients of what clocks and the system say."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import BatchError
from cosmati.train.observers.monitors import machine, speed
from cosmati.train.observers.monitors.machine import MemoryUse, SystemLoad
from cosmati.train.observers.monitors.speed import EstimatedEnd, Throughput, flops_per_row

BUDGET = Budget(Time.parse("20ba"))


def outcome(**clock: float) -> Any:
    given = {"step": 0, "epoch": 0, "step_in_epoch": 0, "rows": 0, "tokens": 0, "seconds": 0.0} | clock
    return SimpleNamespace(clock=Clock(**given))  # type: ignore[arg-type]


def test_rates_are_of_training_since_the_last_measurement() -> None:
    watch = Throughput(flops_per_row=100.0, peak_flops_per_second=1e4)
    watch.start(outcome(step=10, rows=80, tokens=80, seconds=5.0).clock, BUDGET)
    first = watch.measure(outcome(step=14, rows=112, tokens=112, seconds=7.0))
    assert first == {
        "steps_per_second": 2.0,
        "rows_per_second": 16.0,
        "flops_per_second": 1600.0,
        "model_flops_utilization": 0.16,
    }
    second = watch.measure(outcome(step=16, rows=128, tokens=1136, seconds=8.0))
    assert second["tokens_per_second"] == 1024.0
    assert second["rows_per_second"] == 16.0
    assert watch.measure(outcome(step=17, rows=136, tokens=1136, seconds=8.0)) == {}, "no time has passed"
    third = watch.measure(outcome(step=18, rows=144, tokens=1136, seconds=9.0))
    assert third.keys() == first.keys(), "without tokens"


@pytest.mark.parametrize(("flops", "peak"), [(0.0, None), (-1.0, None), (float("inf"), None), (1.0, 0.0), (None, 1.0)])
def test_rates_that_cannot_be_are_refused(flops: float | None, peak: float | None) -> None:
    with pytest.raises(ValueError, match="both are positive and finite"):
        Throughput(flops_per_row=flops, peak_flops_per_second=peak)


def test_the_end_is_estimated_from_where_this_start_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(speed, "monotonic", lambda: now[0])
    watch = EstimatedEnd()
    watch.start(outcome(step=5).clock, BUDGET)
    assert watch.measure(outcome(step=5)) == {"progress": 0.25}
    now[0] += 30
    assert watch.measure(outcome(step=10)) == {"progress": 0.5, "remaining_seconds": pytest.approx(60.0)}
    now[0] += 60
    assert watch.measure(outcome(step=20)) == {"progress": 1.0, "remaining_seconds": pytest.approx(0.0)}


def test_a_rows_operations_are_those_of_its_products() -> None:
    model, rows = nn.Linear(4, 3, bias=False), torch.randn(8, 4, requires_grad=True)
    # Forward, and backward by the weights and by the rows: 2 x 4 x 3 each.
    assert flops_per_row(model, lambda model, data: model(data).sum(), rows) == 3 * 2 * 4 * 3
    assert model.weight.grad is None
    assert rows.grad is None
    with pytest.raises(BatchError, match="without rows"):
        flops_per_row(model, lambda model, data: model(data).sum(), rows[:0])


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0, 10.0]
    monkeypatch.setattr(machine, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine, "process_time", lambda: now[1], raising=False)
    return now


def test_load_is_of_the_time_since_the_last_measurement(clocks: list[float]) -> None:
    watch = SystemLoad()
    watch.start(outcome().clock, BUDGET)
    clocks[:] = [100.0 + machine._PAUSE - 0.01, 30.0]
    assert watch.measure(outcome()) == {}, "too soon"
    clocks[:] = [110.0, 35.0]
    found = watch.measure(outcome())
    assert found["busy_processors"] == 2.5
    assert watch.measure(outcome()) == {}
    clocks[:] = [120.0, 40.0]
    assert watch.measure(outcome())["busy_processors"] == 0.5
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(told["MemAvailable"].split()[0]) * 1024
    assert found["available_memory_bytes"] == pytest.approx(available, rel=0.5)
    assert found["load_average"] == pytest.approx(os.getloadavg()[0], abs=5)


def test_memory_is_that_of_the_process(clocks: list[float]) -> None:
    watch = MemoryUse()
    watch.open(SimpleNamespace(model=nn.Linear(1, 1)))  # type: ignore[arg-type]
    found = watch.measure(outcome())
    told = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    assert found == {"memory_bytes": pytest.approx(int(told["VmRSS"].split()[0]) * 1024, rel=0.2)}
    clocks[0] += machine._PAUSE - 0.01
    assert watch.measure(outcome()) == {}
    clocks[0] += 0.02
    assert watch.measure(outcome()).keys() == {"memory_bytes"}


def test_memory_of_devices_is_added_up(clocks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryUse()
    watch.open(SimpleNamespace(model=nn.Linear(1, 1)))  # type: ignore[arg-type]
    watch._devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    names = (
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "num_alloc_retries",
    )
    told = [dict(zip(names, (base + 1, base + 2, base + 3, base + 4), strict=True)) for base in (10, 200)]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told[device.index])
    found = dict(watch.measure(outcome()))
    del found["memory_bytes"]
    assert found == {
        "device_memory_bytes": 212.0,
        "device_memory_peak_bytes": 214.0,
        "device_memory_reserved_bytes": 216.0,
        "device_memory_retries": 218.0,
    }
