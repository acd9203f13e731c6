"""What `cosmati plan` prints of a run's needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosmati.planning.job import RESERVE, JobPlan

_PLAIN_WIDTH = 120
_OWN = {"at a look": ("look",), "rows change": ("changed rows", "changing")}
_BAD, _GOOD, _DIM = "bold red", "green", "dim"


def show_plan(plan: JobPlan, name: str) -> None:
    """Print a page: memory by part, bytes, time, cost; whether it fits, and what to change.

    Args:
        plan: of the run.
        name: of the recipe.
    """
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False, markup=False, emoji=False)
    m = plan.measured
    per_rank = m.num_microbatches // plan.ranks
    cut = f", cut over {_many(min(plan.shards, plan.ranks), 'rank')}" if plan.shards else ""
    console.print(Text(f"{name} on {_many(plan.ranks, 'rank')}, {plan.device.title}, {plan.sharding}{cut}", "bold"))
    console.print(
        f"V = {m.num_microbatches} microbatches a step, {_many(m.num_rows, 'row')} each; {per_rank} a rank; "
        f"{m.num_elements:,} parameters learn; {m.precision}"
    )
    console.print()
    console.print(_memory(plan))
    unplanned = ", ".join(m.unplanned)
    when = " as the run begins" if unplanned else ""
    fits = f"It {'fits' if plan.fits else 'does not fit'}{when}"
    verdict = f"{fits}: {_size(plan.memory.total)} of {_size(plan.capacity)}"
    console.print(Text(f"{verdict} ({RESERVE:.0%} of a device's memory is left free).", _GOOD if plan.fits else _BAD))
    if unplanned:
        console.print(f"Not in it is what later steps take on account of {unplanned}: that can't be seen beforehand.")
    if not plan.fits:
        console.print("What would make it fit:" if plan.changes else "Nothing that is known here makes it fit.")
        for change in plan.changes:
            about = "about " if change.is_estimated else ""
            console.print(Text(f"  {change.words}: {about}{_size(change.total)}"), soft_wrap=True)
    console.print()
    for line in _lines(plan):
        console.print(line, soft_wrap=True)


def _memory(plan: JobPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of a rank")
    # Of looks and of changed rows only where they take anything.
    moments = {name: parts for name, parts in plan.memory.moments.items() if any(map(parts.get, _OWN.get(name, parts)))}
    for moment in moments:
        table.add_column(moment, justify="right")
    for name in dict.fromkeys(name for parts in moments.values() for name in parts):
        sizes = [parts.get(name, 0) for parts in moments.values()]
        if any(sizes):
            table.add_row(name, *(_size(size) if size else "" for size in sizes))
    totals = [_size(sum(parts.values())) for parts in moments.values()]
    table.add_row(Text("together", "bold"), *(Text(total, "bold") for total in totals))
    return table


def _lines(plan: JobPlan) -> Iterator[str]:
    t, traffic = plan.time, plan.traffic
    within, across = plan.levels
    gathers = f", {_size(traffic.gathers)} of them parameters for forward and backward" if traffic.gathers else ""
    yield f"Bytes: a rank sends {_size(traffic.total)} a step{gathers}"
    yield f"Tree: {_many(within + across, 'level')}, {within} within a rank and {across} across ranks"
    yield (
        f"Time: {_seconds(t.overlapped)} a step where sending is hidden behind backward, "
        f"{_seconds(t.one_after_another)} where it isn't"
    )
    how = "of the peak, as it was here" if plan.device.is_here else "of the peak"
    how += "; starting the kernels takes longer" if t.is_launch_bound else ""
    yield (
        f"  forward and backward {_seconds(t.compute)} ({plan.measured.flops / 1e9:,.3g} GFLOP a microbatch, "
        f"efficiency {t.efficiency:.2g} {how}), optimizers {_seconds(t.optimizers)}, sending {_seconds(t.sending)}"
    )
    goodput = plan.goodput
    if goodput is not None:
        yield (
            f"Failures: {goodput.mean:.1%} of the time counts (95 % interval {goodput.low:.1%} to {goodput.high:.1%}, "
            f"n = {goodput.num_runs} simulated runs), {goodput.of_paid:.1%} of what is paid"
        )
        yield (
            f"  {_many(goodput.nodes, 'node')} and {_many(goodput.spares, 'spare')}, {goodput.failures_per_day:.2g} "
            f"failures a day, a checkpoint every {_seconds(goodput.checkpoint_every_seconds)}; with spares without end "
            f"{goodput.closed_form:.1%}"
        )
    if plan.hours is not None:
        cost = "" if plan.cost is None else f", {plan.cost:,.2f} at {plan.price_per_hour:g} an hour for a rank"
        yield f"Run: {plan.measured.num_steps:,} steps, {_seconds(plan.hours * 3600)}{cost}"
    elif not plan.left:
        yield "Run: it never ends, as failures leave nothing. Take checkpoints more often, or say other figures"
    elif plan.price_per_hour is not None:
        yield "Run: nobody knows its length ahead, nor its cost. Give a budget in steps: --set config.budget=1000ba"


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    return f"{size:,.4g} TB"


def _seconds(seconds: float) -> str:
    for most, by, unit in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < most:
            return f"{seconds / by:.3g} {unit}"
    return f"{seconds / 3600:,.3g} h" if seconds < 172_800 else f"{seconds / 86_400:,.3g} days"
