"""What the ledger's figures of learning cost, each in every step, and by their default cadences; time and bytes.

Norms, directions, updates, digests and entropies are measured in every step of a governed run, beside the same run that
logs none. What they cost at their cadences is that difference over the cadence: cheap to say, and nothing is rounded
away by noise that a hundred steps would have.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.accumulation import timed
from benchmarks.measure import CLOCK, Row, in_turns, write
from benchmarks.over_plain import V, governed
from benchmarks.routing_cost import TAXONOMY, Size
from cosmati import RunConfig
from cosmati.models.size import count_parameters

NEVER = 1_000_000
OFF: dict[str, int] = {
    "details_every": NEVER,
    "update_norm_every": NEVER,
    "direction_every": 0,
    "update_direction_every": 0,
    "digests_every": 0,
    "entropy_every": 0,
}
NOTHING = "ledger, nothing measured"
ARMS: dict[str, tuple[str, ...]] = {
    "norms": ("details_every",),
    "norms and directions": ("direction_every",),
    "update norms": ("update_norm_every",),
    "update norms and directions": ("update_direction_every",),
    "digests": ("digests_every",),
    "entropies": ("entropy_every",),
}


def shares(rows: list[Row], sizes: dict[str, int]) -> dict[str, object]:
    """Return what the figures cost a step at the default cadences, in microseconds and bytes."""
    defaults, over = asdict(RunConfig()), {row.arm: row.over_baseline_us for row in rows}
    micros = found_bytes = 0.0
    for arm, (name,) in ARMS.items():
        if defaults[name]:
            micros += over[arm] / defaults[name]
            found_bytes += (sizes[arm] - sizes[NOTHING]) / defaults[name]
    step = next(row.median_us for row in rows if row.arm == NOTHING)
    return {
        "at the default cadences, us a step": round(micros),
        "of a step": f"{micros / step:.2%}",
        "bytes of details a step without": sizes[NOTHING],
        "more bytes of details a step": round(found_bytes),
        "bytes of details of a step with all of one kind": sizes,
    }


def compare(size: Size, rounds: int) -> tuple[list[Row], dict[str, object]]:
    """Time each kind of figure in every step, in turns."""
    with tempfile.TemporaryDirectory() as place:
        kinds = {NOTHING: (), "the same again (A/A)": (), **ARMS}
        folders = {name: Path(place) / str(number) for number, name in enumerate(kinds)}
        with ExitStack() as runs:
            arms = {}
            for name, figures in kinds.items():
                every: dict[str, Any] = OFF | dict.fromkeys(figures, 1)
                given = size.batches(4), size.policy(), TAXONOMY
                arms[name] = timed(governed(size, runs, *given, run_folder=folders[name], **every), 1)
            rows = in_turns(arms, rounds)
        lines = {name: (folder / "ledger/details.jsonl").read_bytes().splitlines() for name, folder in folders.items()}
    return rows, shares(rows, {name: len(own[-1]) for name, own in lines.items()})


def run(*, quick: bool) -> str:
    """Run the benchmark, write its results and return the tables."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    name, width, blocks, tokens = ("tiny_quick", 32, 2, 32) if quick else ("08m", 128, 4, 64)
    try:
        size = Size(width, blocks, tokens, tokens, "cpu", bfloat16=False)
        rows, notes = compare(size, 3 if quick else 15)
        facts = {"clock": CLOCK, "parameters": count_parameters(size.model()), "V": V, "tokens": tokens, **notes}
        return write(f"ledger_learning_{name}", rows, facts)
    finally:
        torch.set_num_threads(threads)
