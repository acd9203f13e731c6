"""Times arms in turns, so that drift of a shared machine hits all alike, and writes what it saw."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
CLOCK = "processor time of the training thread"


@dataclass(frozen=True)
class Row:
    """One arm: microseconds a step, and the ratio to the baseline taken round by round."""

    arm: str
    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float
    over_baseline_us: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    num_rounds: int


def in_turns(arms: Mapping[str, Callable[[], float]], rounds: int, turns: int = 1) -> list[Row]:
    """Run every arm in each round, the first arm being the baseline.

    Args:
        arms: functions that return seconds a step.
        rounds: counted rounds, after one that isn't.
        turns: how often a round runs every arm; it counts their mean. On a machine whose speed changes from second to
            second, many short turns compare alike where few long ones don't.
    """
    seen: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds + 1):
        total = dict.fromkeys(names, 0.0)
        for turn in range(number * turns, (number + 1) * turns):
            # The order rotates, so that no arm always follows the same other one.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                total[name] += arms[name]()
        if number:
            for name in names:
                seen[name].append(total[name] / turns * 1e6)
    base = seen[names[0]]
    return [_row(name, values, base) for name, values in seen.items()]


def _row(name: str, values: list[float], base: list[float]) -> Row:
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    differences = [value - other for value, other in zip(values, base, strict=True)]
    low, middle, high = statistics.quantiles(values, n=4)
    ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
    return Row(name, middle, low, high, statistics.median(differences), ratio, ratio_low, ratio_high, len(values))


def write(name: str, rows: list[Row], notes: Mapping[str, object], folder: Path | None = None) -> str:
    """Write `results/<name>.json` and `.md`, and return the table."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**surroundings(), **notes}
    lines = [f"# {name}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    lines += [
        "| arm | us a step, median (quartiles) | over the first, us | ratio (quartiles) | rounds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.arm} | {r.median_us:,.1f} ({r.lower_quartile_us:,.1f} to {r.upper_quartile_us:,.1f}) "
        f"| {r.over_baseline_us:+,.1f} "
        f"| {r.ratio:.3f} ({r.ratio_lower_quartile:.3f} to {r.ratio_upper_quartile:.3f}) | {r.num_rounds} |"
        for r in rows
    ]
    table = "\n".join(lines) + "\n"
    (folder / f"{name}.md").write_text(table)
    (folder / f"{name}.json").write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return table


def surroundings() -> dict[str, object]:
    """Return the command and what it ran on."""
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "hardware": hardware(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores, shared"
