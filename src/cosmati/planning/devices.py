"""What a rank computes on: peaks and bandwidths from `devices.toml`, and of this machine's own processor, measured."""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from pydantic import TypeAdapter

from cosmati.errors import PlanError
from cosmati.planning.figures import refuse_beyond, refuse_parts

DEVICES_FILE = "devices.toml"
_SIDES, _COPIED = (256, 512, 1024), 1 << 26
"""Of the matrices whose product is timed, and bytes of what is copied: beyond any cache."""
_REPEATS = 5
_LONG_SECONDS = 0.02
"""That one product takes: a larger one then says no more. Processors without bfloat16 take seconds for it."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device.

    Attributes:
        name: that the command takes.
        title: in words.
        memory_gb: of a rank, 10^9 bytes.
        bf16_tflops: peak of bfloat16, 10^12 floating-point operations a second, dense.
        fp32_tflops: peak of float32.
        memory_gb_per_second: between the device and its memory.
        link_gb_per_second: from a rank to the others of its node, one way.
        network_gb_per_second: a rank's share of what leaves its node, one way.
        ranks_per_node: of a machine.
        is_here: it's this machine's own processor, so what was timed here counts.
    """

    name: str
    title: str
    memory_gb: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    network_gb_per_second: float
    ranks_per_node: int
    is_here: bool = False

    def flops(self, precision: str) -> float:
        """Return the peak for a run's precision, floating-point operations a second."""
        return 1e12 * (self.bf16_tflops if precision == "bfloat16" else self.fp32_tflops)

    def shared(self, ranks: int) -> Device:
        """Return what each of so many ranks has of it: those on this machine share its memory and its cores."""
        if not self.is_here:
            return self
        here = min(ranks, self.ranks_per_node)
        cores = min(1.0, self.ranks_per_node / (here * torch.get_num_threads()))
        return dataclasses.replace(
            self,
            memory_gb=self.memory_gb / here,
            bf16_tflops=self.bf16_tflops * cores,
            fp32_tflops=self.fp32_tflops * cores,
            memory_gb_per_second=self.memory_gb_per_second / here,
        )

    def bandwidth(self, ranks: int) -> float:
        """Return how many bytes a second a rank sends to the others: over the network where they aren't on one node."""
        is_alone = ranks <= self.ranks_per_node
        return 1e9 * (self.link_gb_per_second if is_alone else min(self.link_gb_per_second, self.network_gb_per_second))


def device_names() -> tuple[str, ...]:
    """Return the names of all devices."""
    return tuple(_table())


def device_named(name: str) -> Device:
    """Return a device; this machine's processor is measured, which takes a second.

    Raises:
        PlanError: nobody knows it; the message lists the others.
    """
    table = _table()
    if name not in table:
        near = difflib.get_close_matches(name.lower(), table, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        msg = (
            f"{name!r} is no device that is known.{hint} There are {', '.join(table)}. For another one, take the "
            "nearest and say how it differs: --assume memory_gb=48 --assume bf16_tflops=181."
        )
        raise PlanError(msg)
    figures = dict(table[name]) | {"name": name}
    if name == "cpu":
        figures |= _measured_here()
    return TypeAdapter(Device).validate_python(figures)


def with_figures(device: Device, figures: dict[str, float]) -> Device:
    """Return a device with other figures.

    Raises:
        PlanError: one can't be.
    """
    for name, value in figures.items():
        refuse_beyond(name, value)
    if "ranks_per_node" in figures:
        refuse_parts("ranks_per_node", figures["ranks_per_node"])
        figures = {**figures, "ranks_per_node": int(figures["ranks_per_node"])}
    return dataclasses.replace(device, **figures)  # type: ignore[arg-type]


def _table() -> dict[str, dict[str, object]]:
    return tomllib.loads(files("cosmati.planning").joinpath(DEVICES_FILE).read_text("utf-8"))


def _measured_here() -> dict[str, object]:
    """Time products and a copy, with as many threads as this process has."""
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "memory_gb": own_memory() / 1e9,
        "fp32_tflops": _tflops(torch.float32),
        "bf16_tflops": _tflops(torch.bfloat16),
        "memory_gb_per_second": 2 * _COPIED / _fastest(lambda: target.copy_(source)) / 1e9,
        "ranks_per_node": os.cpu_count() or 1,
        "is_here": True,
    }


def _tflops(dtype: torch.dtype) -> float:
    for side in _SIDES:
        left = torch.ones(side, side, dtype=dtype)
        seconds = _fastest(lambda left=left: left @ left)  # type: ignore[misc]
        if seconds > _LONG_SECONDS:
            break
    return 2 * side**3 / seconds / 1e12


def _fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few, after one that isn't counted."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def own_memory() -> int:
    """Return this machine's memory in bytes, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # No limit, which is written `max`.
        return total
