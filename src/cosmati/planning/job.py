"""A whole plan of a run on so many ranks: memory, bytes, time, cost, whether it fits, and what to change if not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cosmati.errors import PlanError
from cosmati.planning.devices import Device
from cosmati.planning.failures import FailureModel, Goodput, simulate
from cosmati.planning.figures import refuse_beyond
from cosmati.planning.measuring import MeasuredParts
from cosmati.planning.memory import SHARDINGS, MemoryPlan, divisors, memory_of
from cosmati.planning.rows import AtPoint
from cosmati.planning.step_time import StepTime, step_time
from cosmati.planning.traffic import Traffic, traffic_of, tree_levels
from cosmati.train.config import Sharding

RESERVE = 0.1
"""Share of a device's memory that is left free: the context of the driver, workspaces, what lies between blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Something that would make it fit.

    Attributes:
        words: what to do.
        total: bytes that a rank then needs.
        is_estimated: activations are taken to shrink with a microbatch's rows.
    """

    words: str
    total: int
    is_estimated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """A plan.

    Attributes:
        measured: what one microbatch takes here.
        ranks: W.
        sharding: of state and parameters.
        shards: with full sharding, ranks that hold one copy together; None for all.
        device: of each rank.
        memory: bytes of a rank.
        capacity: bytes that a rank has for them.
        traffic: bytes that a rank sends in a step.
        time: of a step.
        levels: of the tree, within a rank and across ranks.
        price_per_hour: of a rank; None where nobody says.
        changes: what would make it fit; empty where it does.
        goodput: what failures leave of it; None where nobody asks.
    """

    measured: MeasuredParts
    ranks: int
    sharding: Sharding
    shards: int | None
    device: Device
    memory: MemoryPlan
    capacity: int
    traffic: Traffic
    time: StepTime
    levels: tuple[int, int]
    price_per_hour: float | None
    changes: tuple[Remedy, ...]
    goodput: Goodput | None

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.memory.total <= self.capacity

    @property
    def left(self) -> float:
        """Share of the time that failures leave, as simulated: 0 where they come sooner than any checkpoint."""
        return 1.0 if self.goodput is None else self.goodput.mean

    @property
    def hours(self) -> float | None:
        """Of the whole run, at the slower of the two step times and what failures leave; None where it has no end."""
        if self.measured.num_steps is None or not self.left:
            return None
        return self.measured.num_steps * self.time.one_after_another / 3600 / self.left

    @property
    def cost(self) -> float | None:
        """Of the whole run, spare nodes too; None where there is no price or no end."""
        if self.price_per_hour is None or self.hours is None:
            return None
        spare = 0 if self.goodput is None else self.goodput.spares * min(self.ranks, self.device.ranks_per_node)
        return self.hours * (self.ranks + spare) * self.price_per_hour

    def as_mapping(self) -> dict[str, Any]:
        """Return everything for programs: bytes, seconds, and the price's currency."""
        facts: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("measured", "device", "memory", "traffic", "time"):
            facts[name] = asdict(facts[name])
        facts["goodput"] = None if self.goodput is None else asdict(self.goodput)
        facts["changes"] = [asdict(change) for change in self.changes]
        facts["memory"] |= {"total": self.memory.total}
        facts["traffic"] |= {"total": self.traffic.total}
        facts["time"] |= {
            "overlapped": self.time.overlapped,
            "one_after_another": self.time.one_after_another,
        }
        return {**facts, "fits": self.fits, "hours": self.hours, "cost": self.cost}


def plan_job(
    measured: MeasuredParts,
    ranks: int,
    device: Device,
    sharding: Sharding = "replicated",
    *,
    shards: int | None = None,
    efficiency: float | None = None,
    price_per_hour: float | None = None,
    failures: FailureModel | None = None,
) -> JobPlan:
    """Plan a run.

    Args:
        measured: what one microbatch takes here.
        ranks: W, which divides V.
        device: of each rank.
        sharding: what only one rank holds.
        shards: with full sharding, ranks that hold one copy together; None for all.
        efficiency: share of the peak (see `step_time`).
        price_per_hour: of a rank.
        failures: simulate these.

    Raises:
        PlanError: W doesn't divide V, there's no such sharding, or a figure can't be.
    """
    if sharding not in SHARDINGS:
        raise PlanError(f"There is no sharding {sharding!r}. Take one of {', '.join(SHARDINGS)}.")
    if efficiency is not None:
        refuse_beyond("efficiency", efficiency, most=1)  # It's a share of the peak.
    if price_per_hour is not None:
        refuse_beyond("price_per_hour", price_per_hour)
    memory = memory_of(measured, ranks, sharding, shards)
    traffic = traffic_of(measured, ranks, sharding, shards)
    capacity = int(device.shared(ranks).memory_gb * 1e9 * (1 - RESERVE))
    goodput = None
    if failures is not None:
        goodput = simulate(failures, ranks, device.ranks_per_node, measured.num_microbatches)
    return JobPlan(
        measured=measured,
        ranks=ranks,
        sharding=sharding,
        shards=shards,
        device=device,
        memory=memory,
        capacity=capacity,
        traffic=traffic,
        time=step_time(measured, ranks, sharding, traffic, device, efficiency, shards),
        levels=tree_levels(measured.num_microbatches, ranks),
        price_per_hour=price_per_hour,
        changes=() if memory.total <= capacity else tuple(_changes(measured, ranks, device, sharding, shards)),
        goodput=goodput,
    )


def _changes(
    measured: MeasuredParts, ranks: int, device: Device, sharding: Sharding, shards: int | None
) -> Iterator[Remedy]:
    """Yield what would make it fit, one thing at a time: sharding, smaller microbatches, more ranks; then the lot."""

    def fitting(parts: MeasuredParts, num: int, how: Sharding) -> int | None:
        total = memory_of(parts, num, how, shards if how == sharding else None).total
        return total if total <= device.shared(num).memory_gb * 1e9 * (1 - RESERVE) else None

    v, more = measured.num_microbatches, SHARDINGS[SHARDINGS.index(sharding) + 1 :]
    for how in more if ranks > 1 else ():
        if (total := fitting(measured, ranks, how)) is not None:
            yield Remedy(words=f"shard more: --sharding {how}", total=total)
    for more_shards in (num for num in divisors(ranks) if shards and num > shards):
        total = memory_of(measured, ranks, sharding, more_shards).total
        if total <= device.shared(ranks).memory_gb * 1e9 * (1 - RESERVE):
            yield Remedy(words=f"fewer copies: --set config.shard_ranks={more_shards}", total=total)
            break
    for times in _smaller_by(measured.num_rows):
        if (total := fitting(smaller(measured, times), ranks, sharding)) is not None:
            words = f"smaller microbatches: --set config.num_microbatches={v * times}"
            yield Remedy(words=words, total=total, is_estimated=True)
            break
    for how, num in ((how, num) for how in (sharding, *more) for num in divisors(v) if num > ranks):
        if (total := fitting(measured, num, how)) is not None:
            yield Remedy(words=f"more ranks: --ranks {num} --sharding {how}", total=total)
            break
    if (total := fitting(scaled(measured, activations=0), ranks, sharding)) is not None:
        words = "fewer activations: torch.utils.checkpoint around blocks, use_reentrant=False (the figure is with none)"
        yield Remedy(words=words, total=total, is_estimated=True)


def _smaller_by(num_rows: int) -> list[int]:
    """Return by how much a microbatch's rows can be halved, and halved again."""
    return [1 << power for power in range(1, num_rows.bit_length()) if num_rows % (1 << power) == 0]


def smaller(measured: MeasuredParts, times: int) -> MeasuredParts:
    """Return what microbatches of fewer rows would take, if all that belongs to rows shrinks with their number.

    Args:
        measured: as it is.
        times: as many more microbatches a step, of as many times fewer rows.
    """
    return dataclasses.replace(
        scaled(measured, activations=1 / times, rows=1 / times),
        num_microbatches=measured.num_microbatches * times,
        is_plain=False,
        rows=-(-measured.rows // times),
        num_rows=measured.num_rows // times,
        num_tokens=measured.num_tokens // times,
        flops=measured.flops // times,
        seconds=measured.seconds / times,
    )


def scaled(measured: MeasuredParts, *, activations: float, rows: float = 1) -> MeasuredParts:
    """Return what it would be if activations, and rows that methods change, took so many times as much everywhere.

    Args:
        measured: as it is.
        activations: how many times as much.
        rows: how many times as much.
    """
    points = [
        AtPoint(
            activations=math.ceil(point.activations * activations),
            first_activations=math.ceil(point.first_activations * activations),
            changed=math.ceil(point.changed * rows),
            changing=math.ceil(point.changing * rows),
        )
        for point in measured.points
    ]
    return dataclasses.replace(measured, **dataclasses.asdict(points[0]), elsewhere=tuple(points[1:]))
