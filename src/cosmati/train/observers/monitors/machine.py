"""What the run takes of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from time import monotonic, process_time

import torch

from cosmati.core.clock import Budget, Clock
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.outcome import StepOutcome

_PAUSE = 5.0
"""Seconds: the system takes 0.1 ms to say what it says, and its figures are means over more."""
_CUDA = {
    "allocated_bytes.all.current": "device_memory_bytes",
    "allocated_bytes.all.peak": "device_memory_peak_bytes",
    "reserved_bytes.all.current": "device_memory_reserved_bytes",
    "num_alloc_retries": "device_memory_retries",
}


class MemoryUse(Monitor):
    """Memory of this process, and on CUDA that of its device as PyTorch's allocator counts it.

    Measured every five seconds at most. Publishes `memory_bytes`, `device_memory_bytes`, `device_memory_peak_bytes`,
    `device_memory_reserved_bytes` and `device_memory_retries`.
    """

    def open(self, run: WatchedRun) -> None:
        """Find the device."""
        devices = {parameter.device for parameter in run.model.parameters()}
        self._devices = [device for device in devices if device.type == "cuda"]
        self._last = -math.inf

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return what the system and the allocator say."""
        now, found = monotonic(), dict[str, float]()
        if now - self._last < _PAUSE:
            return {}
        self._last = now
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found["memory_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError, IndexError):
            pass  # not Linux
        for device in self._devices:
            told = torch.cuda.memory_stats(device)
            for name, ours in _CUDA.items():
                found[ours] = found.get(ours, 0.0) + float(told.get(name, 0))
        return found


class SystemLoad(Monitor):
    """Processors that this process keeps busy since the last measurement, the machine's load, and its free memory.

    Measured every five seconds at most. Publishes `busy_processors`, `load_average`, `available_memory_bytes`.
    """

    def start(self, clock: Clock, budget: Budget) -> None:
        """Count from here."""
        self._last = monotonic(), process_time()

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return what the system says."""
        last, now = self._last, monotonic()
        if now - last[0] < _PAUSE:
            return {}
        self._last = now, process_time()
        found = {"busy_processors": (self._last[1] - last[1]) / max(self._last[0] - last[0], 1e-9)}
        try:
            found["load_average"] = os.getloadavg()[0]
            with Path("/proc/meminfo").open() as file:
                told = next(line for line in file if line.startswith("MemAvailable"))
            found["available_memory_bytes"] = float(told.split()[1]) * 1024
        except (OSError, StopIteration, ValueError, IndexError):
            pass  # not Linux
        return found
