"""A profile lets steps pass, measures as many as it was asked for and profiles as many, and tells their sums a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from cosmati.core.clock import Clock
from cosmati.errors import RunError
from cosmati.train import profiling
from cosmati.train.observers import Observer
from cosmati.train.profiling import StepProfile, _Profiling, _rename, _table, profiled
from cosmati.train.timing import Stopwatch


def profile(device_seconds: float | None = None, seconds: float = 4.0, **by_part: float) -> StepProfile:
    return StepProfile(
        num_steps=1,
        seconds=seconds,
        by_part=by_part or {"forward": seconds},
        operators=(),
        device_seconds=device_seconds,
        flops=0.0,
        files=(),
    )


def test_the_verdict_changes_only_beyond_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_WAITS_FOR_DATA", 0.25)
    monkeypatch.setattr(profiling, "_DEVICE_IS_BUSY", 0.75)
    monkeypatch.setattr(profiling, "_DEVICE_IS_IDLE", 0.5)
    assert profile(data=1.0, forward=3.0).bound == "forward: 75% of a step on the CPU. See the operators."
    assert profile(data=1.1, forward=2.9).bound.startswith("data: 28% of a step is waiting for rows")
    assert profile(3.0).bound.startswith("host and device alike: the device is busy 75%")
    assert profile(3.1).bound.startswith("the device: it runs kernels 78%")
    assert profile(2.0).bound.startswith("host and device alike: the device is busy 50%")
    assert profile(1.9).bound.startswith("the host: the device is busy 48%")
    assert profile(0.0).bound.startswith("the host: the device is busy 0%")


def test_the_bounds_are_shares_of_a_step() -> None:
    assert (profiling._WAITS_FOR_DATA, profiling._DEVICE_IS_BUSY, profiling._DEVICE_IS_IDLE) == (0.3, 0.85, 0.6)


def test_without_rows_to_wait_for_the_largest_part_bounds_a_step() -> None:
    assert profile(forward=1.0, backward=2.5, optimizer=0.5).bound.startswith("backward: 62%")


class Device:
    """Notes what's asked of the accelerator and of the profiler, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.asked.append("wait"))
        monkeypatch.setattr(
            torch.cuda.memory, "_record_memory_history", lambda enabled="all": self.asked.append(("history", enabled))
        )
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)
        monkeypatch.setattr(torch.profiler, "profile", self._profile)

    def _dump(self, file: str) -> None:
        Path(file).write_text("memory")
        self.asked.append("dump")

    def _profile(self, activities: list[Any], *, with_flops: bool) -> Any:
        self.asked.append(([one.name for one in activities], with_flops))
        return SimpleNamespace(
            start=lambda: self.asked.append("start"),
            stop=lambda: self.asked.append("stop"),
            export_chrome_trace=lambda file: Path(file).write_text(json.dumps({"traceEvents": [EVENT]})),
            key_averages=list,
            events=list,
        )


EVENT = {"name": f"{profiling._RANGE}0"}


def watching(warm_up: int, num_steps: int, *, on: str = "cpu") -> tuple[_Profiling, list[str]]:
    watch, stopped = _Profiling(warm_up, num_steps), list[str]()
    watch.stopwatch = Stopwatch()
    parameters = [SimpleNamespace(device=torch.device(kind)) for kind in ("cpu", on)]
    run: Any = SimpleNamespace(model=SimpleNamespace(parameters=lambda: parameters), stop=stopped.append)
    watch.on_open(run)
    return watch, stopped


def steps(watch: _Profiling, number: int, parts: dict[str, float]) -> None:
    assert watch.stopwatch is not None
    for part, seconds in parts.items():
        watch.stopwatch.seconds[part] = watch.stopwatch.seconds.get(part, 0.0) + seconds
    watch.on_step(SimpleNamespace(clock=SimpleNamespace(step=number, seconds=1.0)))  # type: ignore[arg-type]


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_steps_pass_are_measured_and_are_profiled(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    watch, stopped = watching(2, 4, on=on)
    assert watch._is_cuda == (on == "cuda")
    for number in range(1, 11):
        before = len(device.asked)
        steps(watch, number, {"forward": number, "backward": 2.0} if number > 2 else {"forward": 100.0})
        assert (watch.measured is not None) == (number >= 6)
        assert watch.is_done == (number == 10) == bool(stopped)
        if number not in (2, 6, 10):
            assert len(device.asked) == before
    # Of steps 3, 4, 5 and 6.
    assert watch.measured == {"forward": (3 + 4 + 5 + 6) / 4, "backward": 2.0}
    assert stopped == ["it was profiled"]
    if on == "cuda":
        history = [("history", "all")]
        assert device.asked == ["wait", "wait", *history, (["CPU", "CUDA"], True), "start", "wait", "stop"]
    else:
        assert device.asked == [(["CPU"], True), "start", "stop"]


def test_laps_are_ranges_whose_names_are_known_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    ranges: list[tuple[str, str]] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            ranges.append(("open", self.name))

        def __exit__(self, *_: object) -> None:
            ranges.append(("close", self.name))

    monkeypatch.setattr(profiling, "record_function", Range)
    watch, _ = watching(1, 1)
    assert watch.stopwatch is not None
    steps(watch, 1, {})
    assert watch.stopwatch.on_lap is None
    steps(watch, 2, {"forward": 1.0})
    watch.stopwatch.lap("data")
    watch.stopwatch.lap("forward")
    steps(watch, 3, {})
    assert watch.stopwatch.on_lap is None
    assert watch.names == ["data", "forward", "ledger"]
    names = [f"{profiling._RANGE}{index}" for index in range(3)]
    assert ranges == [(act, name) for name in names for act in ("open", "close")]
    assert watch._range is None


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_a_run_that_ends_while_it_is_profiled_stops_the_profiler_and_is_not_done(
    on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, clock = Device(monkeypatch), Clock()
    watch, _ = watching(1, 1, on=on)
    steps(watch, 1, {})
    watch.on_end(clock, "failed")
    assert "stop" not in device.asked
    steps(watch, 2, {})
    watch.on_end(clock, "failed")
    assert not watch.is_done
    assert device.asked.count("stop") == 1
    assert (("history", None) in device.asked) == (on == "cuda")
    assert watch.stopwatch is not None
    assert watch.stopwatch.on_lap is None


def test_a_run_that_ends_once_it_was_profiled_stops_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    watch, _ = watching(1, 1, on="cuda")
    for number in (1, 2, 3):
        steps(watch, number, {})
    asked = list(device.asked)
    watch.on_end(Clock(), "stopped")
    assert watch.is_done
    assert device.asked == asked


# From start to end.


def trainer_of(num_steps: int, *, on: str = "cpu") -> Callable[[Sequence[Observer]], Any]:
    def made(observers: Sequence[Observer]) -> Any:
        (watch,) = observers
        assert isinstance(watch, _Profiling)
        parameters = [SimpleNamespace(device=torch.device(on))]
        run: Any = SimpleNamespace(model=SimpleNamespace(parameters=lambda: parameters), stop=lambda why: None)
        stopwatch = Stopwatch()

        def fit() -> Any:
            watch.on_open(run)
            assert watch.stopwatch is stopwatch
            for number in range(1, num_steps + 1):
                steps(watch, number, {"forward": 2.0, "idle": 0.0})
            return SimpleNamespace(clock=SimpleNamespace(step=num_steps))

        device = SimpleNamespace(type=on)
        return SimpleNamespace(stopwatch=stopwatch, fit=fit, assembly=SimpleNamespace(device=device))

    return made


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_a_profile_writes_its_files_and_tells_them(on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    folder = tmp_path / "a" / "b"
    found = profiled(trainer_of(5, on=on), folder, warm_up=1, num_steps=2)
    assert (found.num_steps, found.seconds, found.by_part) == (2, 2.0, {"forward": 2.0})
    assert found.device_seconds == (0.0 if on == "cuda" else None)
    names = ["trace.json", "memory.pickle"] if on == "cuda" else ["trace.json"]
    assert found.files == tuple(folder / name for name in names)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert json.loads((folder / "trace.json").read_text())["traceEvents"] == [{"name": "cosmati: ledger"}]
    assert device.asked[-2:] == (["dump", ("history", None)] if on == "cuda" else ["start", "stop"])
    profiled(trainer_of(5), folder, warm_up=1, num_steps=2)  # A folder that's there is written into.


def test_by_default_five_steps_pass_and_ten_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    assert profiled(trainer_of(25), tmp_path).num_steps == 10
    with pytest.raises(RunError, match=r"The run ended after 24 steps, and a profile takes 25: give it a longer"):
        profiled(trainer_of(24), tmp_path)
    with pytest.raises(RunError, match=r"ended after 4 steps, and a profile takes 7"):
        profiled(trainer_of(4), tmp_path, warm_up=1, num_steps=3)


@pytest.mark.parametrize(("warm_up", "num_steps"), [(0, 1), (1, 0), (-1, 1), (1.0, 1), (1, 1.0)])
def test_numbers_of_steps_are_whole_and_at_least_one(warm_up: Any, num_steps: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"A profile of {num_steps} steps after {warm_up}: both have to be at least 1"):
        profiled(trainer_of(9), tmp_path / "out", warm_up=warm_up, num_steps=num_steps)
    assert not (tmp_path / "out").exists()


def test_one_step_of_each_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    assert profiled(trainer_of(3), tmp_path, warm_up=1, num_steps=1).num_steps == 1


def test_a_folder_that_cannot_be_made_is_told_with_a_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.* can't be made \(.*\)\. Give the folder for the trace, --out profile"):
        profiled(trainer_of(9), tmp_path / "file")


# The table.


def averaged(key: str, count: int, cpu: float, device: float, flops: float = 0.0) -> Any:
    return SimpleNamespace(key=key, count=count, self_cpu_time_total=cpu, self_device_time_total=device, flops=flops)


def event(name: str, kind: DeviceType, microseconds: float) -> Any:
    return SimpleNamespace(name=name, device_type=kind, device_time_total=microseconds)


def table(*, is_cuda: bool) -> StepProfile:
    watch = _Profiling(1, 4)
    watch.measured = {"forward": 0.5, "data": 0.0, "backward": 1.5}
    one = [averaged(f"op{index}", 8, 1e6 * (12 - index), 1e6 * index, 4.0) for index in range(12)]
    own = averaged(f"{profiling._RANGE}3", 99, 1e9, 1e9, 1e9)
    kernels = [
        *(event("k", DeviceType.CUDA, 3e6), event("l", DeviceType.CUDA, 5e6), event("m", DeviceType.CPU, 7e6)),
        event(f"{profiling._RANGE}3", DeviceType.CUDA, 1e9),
    ]
    watch.profiler = SimpleNamespace(key_averages=lambda: [own, *reversed(one)], events=lambda: kernels)
    return _table(watch, 4, (Path("t"),), is_cuda=is_cuda)


def test_a_table_is_of_one_step_and_of_the_ten_dearest_operators() -> None:
    found = table(is_cuda=False)
    assert (found.num_steps, found.seconds, found.files) == (4, 2.0, (Path("t"),))
    assert found.by_part == {"forward": 0.5, "backward": 1.5}
    assert found.operators == tuple((f"op{index}", 2.0, (12 - index) / 4) for index in range(10))
    assert (found.device_seconds, found.flops) == (None, 12.0)


def test_on_an_accelerator_operators_count_by_their_kernels() -> None:
    found = table(is_cuda=True)
    assert found.operators == tuple((f"op{index}", 2.0, index / 4) for index in range(11, 1, -1))
    assert found.device_seconds == 2.0


def test_ranges_get_the_names_of_their_parts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    names = [f"{profiling._RANGE}1", "aten::mm", f"{profiling._RANGE}0", 7]
    events = [{"name": name, "ts": index} for index, name in enumerate(names)]
    trace.write_bytes(json.dumps({"traceEvents": [*events, {"ts": 9}, {"name": "?"}], "x": 1}).encode() + b"  ")
    raw = trace.read_bytes().replace(b'"?"', b'"\xff"')  # Kineto writes names as they come.
    trace.write_bytes(raw)
    _rename(trace, ["data", "forward"])
    found = json.loads(trace.read_text(encoding="utf-8"))
    assert found["x"] == 1
    assert [one.get("name") for one in found["traceEvents"]] == [
        *("cosmati: forward", "aten::mm", "cosmati: data", 7, None, "\ufffd"),
    ]
