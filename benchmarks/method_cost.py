"""(e) What each method's whole runs cost against the baseline's, on the evidence study's two tasks, one thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import evidence
from benchmarks.measure import RESULTS, hardware, in_turns, write

SMALLEST = min(evidence.BUDGETS)


def seconds_a_step(task: evidence.Task, arm: str, num_steps: int) -> float:
    """Train for some steps, and return the training time of one, evaluation and setup left out."""
    rates = evidence.best_rates(evidence.read_trials())
    trainer = evidence.recipe_of(task, arm, num_steps, 0, rates).trainer()
    result = trainer.fit()
    parts = {name: value for name, value in result.seconds_by_part.items() if name not in ("evaluation", "checkpoint")}
    # A run that is dilated has other steps; the baseline's count is what its budget means.
    return sum(parts.values()) / num_steps


def run(*, quick: bool) -> str:
    """Time every arm in turns, and write `method_cost.json` for the cards."""
    torch.set_num_threads(1)
    suffix = "_quick" if quick else ""
    found, tables = [], []
    for task in ("vision", "language"):
        num_steps = max(4, round(evidence.NUM_STEPS[task] * SMALLEST / (10 if quick else 1)))
        arms: dict[str, Callable[[], float]] = {
            arm: partial(seconds_a_step, task, arm, num_steps) for arm in evidence.arms_of(task)
        }
        rows = in_turns(arms, 2 if quick else 7)
        notes = {
            "what": f"whole runs of {num_steps} steps, training time only; the first arm is the baseline, `aa` too"
        }
        tables.append(write(f"method_cost_{task}{suffix}", rows, notes))
        found += [
            {
                "method": row.arm,
                "task": task,
                "n": row.num_rounds,
                "ratio": round(row.ratio, 4),
                "low": round(row.ratio_lower_quartile, 4),
                "high": round(row.ratio_upper_quartile, 4),
            }
            for row in rows[1:]
        ]
    facts = {"hardware": hardware(), "command": "python -m benchmarks method_cost", "rows": found}
    (RESULTS / f"method_cost{suffix}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return "\n".join(tables)
