"""A few steps under PyTorch's profiler, with the parts of a step by our names, and what bounds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function

from cosmati.core.clock import Clock
from cosmati.errors import RunError
from cosmati.train.observers import Observer, StepOutcome, WatchedRun
from cosmati.train.timing import Stopwatch
from cosmati.train.trainer import Trainer

_RANGE = "cosmati part "
PREFIX = "cosmati: "
"""Of the parts' names in the trace."""
_NUM_OPERATORS = 10
_WAITS_FOR_DATA, _DEVICE_IS_BUSY, _DEVICE_IS_IDLE = 0.3, 0.85, 0.6
"""Shares of a step."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """What a step's time goes to.

    Attributes:
        num_steps: that were measured without the profiler, and as many with it.
        seconds: of a step, without the profiler.
        by_part: of these, by part: the host's seconds.
        operators: name, calls a step, and seconds a step of its own, on the accelerator where there is one; the most
            expensive first.
        device_seconds: in which the accelerator ran kernels, a step; None without one.
        flops: of a step, as PyTorch counts them: products of matrices, convolutions, sums and products of elements.
        files: that were written.
    """

    num_steps: int
    seconds: float
    by_part: dict[str, float]
    operators: tuple[tuple[str, float, float], ...]
    device_seconds: float | None
    flops: float
    files: tuple[Path, ...]

    @property
    def bound(self) -> str:
        """What bounds the step, and what to try, in words."""
        shares = {part: seconds / self.seconds for part, seconds in self.by_part.items()}
        waits = shares.get("data", 0.0)
        if waits > _WAITS_FOR_DATA:
            return f"data: {waits:.0%} of a step is waiting for rows. Use more workers, or prepare rows ahead."
        if self.device_seconds is not None:
            busy = self.device_seconds / self.seconds
            if busy > _DEVICE_IS_BUSY:
                return f"the device: it runs kernels {busy:.0%} of the time. See the operators."
            if busy < _DEVICE_IS_IDLE:
                return f"the host: the device is busy {busy:.0%} of the time. Use larger batches, or compile."
            return f"host and device alike: the device is busy {busy:.0%} of the time."
        part = max(shares, key=shares.__getitem__)
        return f"{part}: {shares[part]:.0%} of a step on the CPU. See the operators."

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"A step takes {self.seconds * 1e3:.2f} ms (mean of {self.num_steps}, without the profiler)", ""]
        lines += [f"{'part':<32}{'ms':>10}{'share':>9}"]
        parts = sorted(self.by_part.items(), key=lambda one: -one[1])
        lines += [f"{part:<32}{own * 1e3:>10.3f}{own / self.seconds:>9.1%}" for part, own in parts]
        if self.device_seconds is not None:
            busy = self.device_seconds / self.seconds
            lines += [f"{'(device, in kernels)':<32}{self.device_seconds * 1e3:>10.3f}{busy:>9.1%}"]
        lines += ["", f"{'operator (under the profiler)':<52}{'calls':>8}{'ms':>10}"]
        lines += [f"{name[:50]:<52}{calls:>8.1f}{own * 1e3:>10.3f}" for name, calls, own in self.operators]
        lines += ["", f"Bound by {self.bound}"]
        if self.flops:
            lines += [f"{self.flops / 1e9:.2f} GFLOP a step, {self.flops / self.seconds / 1e9:.1f} GFLOP/s"]
        return "\n".join(lines)


class _Profiling(Observer):
    """Lets some steps pass, measures some, profiles as many, and stops the run."""

    def __init__(self, warm_up: int, num_steps: int) -> None:
        self.warm_up, self.num_steps = warm_up, num_steps
        self.names: list[str] = []
        self.measured: dict[str, float] | None = None
        self.profiler: Any = None
        self.is_done = False
        self._range: record_function | None = None
        self.stopwatch: Stopwatch | None = None

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run."""
        self._run = run
        self._is_cuda = any(parameter.device.type == "cuda" for parameter in run.model.parameters())

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def on_step(self, outcome: StepOutcome) -> None:
        """Go on to the next phase between two steps."""
        assert self.stopwatch is not None, "set with the trainer"
        step = outcome.clock.step
        if step == self.warm_up:
            self._wait()
            self._before = dict(self.stopwatch.seconds)
            self._since = outcome.clock.seconds
        elif step == self.warm_up + self.num_steps:
            self._wait()
            now = self.stopwatch.seconds
            self.measured = {part: (now[part] - self._before.get(part, 0.0)) / self.num_steps for part in now}
            self._start()
        elif step == self.warm_up + 2 * self.num_steps:
            self._wait()
            self._stop()
            self._run.stop("it was profiled")

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()  # noqa: SLF001
        self.profiler = torch.profiler.profile(activities=activities, with_flops=True)
        self.profiler.start()
        assert self.stopwatch is not None, "as above"
        self._open()
        self.stopwatch.on_lap = self._lap

    def _open(self) -> None:
        self._range = record_function(f"{_RANGE}{len(self.names)}")
        self._range.__enter__()

    def _close(self, part: str) -> None:
        assert self._range is not None, "open"
        self._range.__exit__(None, None, None)
        self._range = None
        self.names.append(part)

    def _lap(self, part: str) -> None:
        self._close(part)
        self._open()

    def _stop(self) -> None:
        assert self.stopwatch is not None, "as above"
        self.stopwatch.on_lap = None
        self._close("ledger")
        self.profiler.stop()
        self.is_done = True

    def on_end(self, clock: Clock, ended: str) -> None:
        """Where a step has failed, stop the profiler."""
        if self.profiler is not None and not self.is_done:
            self._stop()
            self.is_done = False
            if self._is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def profiled(
    trainer_of: Callable[[Sequence[Observer]], Trainer], folder: Path, *, warm_up: int = 5, num_steps: int = 10
) -> StepProfile:
    """Train a few steps, and say what bounds them; writes `trace.json` for chrome://tracing and ui.perfetto.dev.

    On CUDA `memory.pickle` is written besides, for pytorch.org/memory_viz.

    Args:
        trainer_of: makes the trainer, given the observers.
        folder: where files go.
        warm_up: steps before anything is measured.
        num_steps: steps that are measured, and as many under the profiler.

    Raises:
        RunError: the run ends before that, a number isn't possible, or the folder can't be made.
    """
    if not (isinstance(warm_up, int) and isinstance(num_steps, int) and warm_up >= 1 and num_steps >= 1):
        raise RunError(f"A profile of {num_steps} steps after {warm_up}: both have to be at least 1, and whole.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{folder} can't be made ({error}). Give the folder for the trace, --out profile for one."
        raise RunError(msg) from error
    watch = _Profiling(warm_up, num_steps)
    trainer = trainer_of([watch])
    watch.stopwatch = trainer.stopwatch
    result = trainer.fit()
    if not watch.is_done or watch.measured is None:
        msg = (
            f"The run ended after {result.clock.step} steps, and a profile takes {warm_up + 2 * num_steps}: give it a "
            "longer budget, --set config.budget=100ba, or take fewer steps."
        )
        raise RunError(msg)
    trace = folder / "trace.json"
    watch.profiler.export_chrome_trace(str(trace))
    _rename(trace, watch.names)
    files = [trace]
    if trainer.assembly.device.type == "cuda":
        files.append(folder / "memory.pickle")
        torch.cuda.memory._dump_snapshot(str(files[-1]))  # noqa: SLF001
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
    return _table(watch, num_steps, tuple(files), is_cuda=trainer.assembly.device.type == "cuda")


def _table(watch: _Profiling, num_steps: int, files: tuple[Path, ...], *, is_cuda: bool) -> StepProfile:
    averages = [one for one in watch.profiler.key_averages() if not one.key.startswith(_RANGE)]
    own = {one.key: (one.self_device_time_total if is_cuda else one.self_cpu_time_total) for one in averages}
    ranked = sorted(averages, key=lambda one: -own[one.key])[:_NUM_OPERATORS]
    assert watch.measured is not None, "checked"
    kernels = sum(
        event.device_time_total
        for event in watch.profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(_RANGE)
    )
    return StepProfile(
        num_steps=num_steps,
        seconds=sum(watch.measured.values()),
        by_part={part: seconds for part, seconds in watch.measured.items() if seconds > 0},
        operators=tuple((one.key, one.count / num_steps, own[one.key] / 1e6 / num_steps) for one in ranked),
        device_seconds=kernels / 1e6 / num_steps if is_cuda else None,
        flops=sum(one.flops for one in averages) / num_steps,
        files=files,
    )


def _rename(trace: Path, names: list[str]) -> None:
    """Give the ranges the names of the parts, which are known only as they end."""
    told = json.loads(trace.read_text(encoding="utf-8", errors="replace"))
    for event in told["traceEvents"]:
        name = str(event.get("name", ""))
        if name.startswith(_RANGE):
            event["name"] = PREFIX + names[int(name.removeprefix(_RANGE))]
    trace.write_text(json.dumps(told), encoding="utf-8")
