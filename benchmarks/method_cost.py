"""(e) What each method's whole runs cost against off, on the evidence study's two tasks, one thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks import evidence
from benchmarks.measure import RESULTS, Row, hardware, in_turns, write
from cosmati import methods as m
from cosmati.core.method import Method
from cosmati.methods.building_blocks.surgery import replace_modules
from cosmati.recipes.recipe import Recipe

SMALLEST = min(evidence.BUDGETS)


def seconds_a_step(make: Callable[[], Recipe], num_steps: int) -> float:
    """Train, and return the training time over the baseline's number of steps, evaluation and setup left out."""
    result = make().trainer().fit()
    parts = {name: value for name, value in result.seconds_by_part.items() if name not in ("evaluation", "checkpoint")}
    return sum(parts.values()) / num_steps


def recipe(task: evidence.Task, arm: str, num_steps: int) -> Recipe:
    """Return an arm's recipe."""
    return evidence.recipe_of(task, arm, num_steps, 0, evidence.best_rates(evidence.read_trials()))


def group_norm(num_steps: int, methods: tuple[Method, ...]) -> Recipe:
    """Return the vision baseline with GroupNorm, in bfloat16, which no arm of the study is."""
    base = recipe("vision", "baseline", num_steps)

    def model() -> nn.Module:
        made = base.model()
        return replace_modules(
            made, {n: nn.GroupNorm(4, n.num_features) for n in made.modules() if isinstance(n, nn.BatchNorm2d)}
        )

    return replace(base, model=model, methods=methods, config=replace(base.config, precision="bfloat16"))


def against_off(num_steps: Mapping[str, int]) -> dict[tuple[evidence.Task, str], list[Callable[[], Recipe]]]:
    """Return off and on of the methods whose off isn't the baseline, or which learn nothing."""
    pairs: dict[tuple[evidence.Task, str], list[Callable[[], Recipe]]] = {
        ("language", arm): [partial(recipe, "language", which, num_steps["language"]) for which in (off, arm)]
        for arm, off in evidence.OFF.items()
    }
    steps = num_steps["vision"]
    pairs["vision", "LowPrecisionGroupNorm"] = [
        partial(group_norm, steps, chosen) for chosen in ((), (m.LowPrecisionGroupNorm(),))
    ]
    tasks: tuple[evidence.Task, ...] = ("vision", "language")
    for task in tasks:
        for method in (m.NoOpModel(), m.ScaleSchedule(ratio=0.5)):
            base = recipe(task, "baseline", num_steps[task])
            pairs[task, type(method).__name__] = [partial(replace, base, methods=chosen) for chosen in ((), (method,))]
    return pairs


def row_of(task: str, row: Row, off: str = "baseline") -> dict[str, object]:
    """Return a row for the cards."""
    ends = {"low": round(row.ratio_lower_quartile, 4), "high": round(row.ratio_upper_quartile, 4)}
    return {"method": row.arm, "off": off, "task": task, "n": row.num_rounds, "ratio": round(row.ratio, 4), **ends}


def run(*, quick: bool) -> str:
    """Time every arm in turns, and write `method_cost.json` for the cards."""
    torch.set_num_threads(1)
    suffix, rounds = ("_quick", 2) if quick else ("", 3)
    tasks: tuple[evidence.Task, ...] = ("vision", "language")
    num_steps = {t: max(4, round(evidence.NUM_STEPS[t] * SMALLEST / (10 if quick else 1))) for t in tasks}
    found: list[dict[str, object]] = []
    tables = []
    for task in tasks:
        steps = num_steps[task]
        arms = {a: partial(seconds_a_step, partial(recipe, task, a, steps), steps) for a in evidence.arms_of(task)}
        rows = in_turns(arms, rounds)
        notes = {"what": f"whole runs of {steps} steps, training time only; `aa` is the baseline once more"}
        tables.append(write(f"method_cost_{task}{suffix}", rows, notes))
        found += [row_of(task, row) for row in rows[1:]]
    found += off_rows(num_steps, rounds, tables, suffix)
    facts = {"hardware": hardware(), "command": "python -m benchmarks method_cost", "rows": found}
    (RESULTS / f"method_cost{suffix}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return "\n".join(tables)


def off_rows(num_steps: Mapping[str, int], rounds: int, tables: list[str], suffix: str) -> list[dict[str, object]]:
    """Time the methods that have an off of their own, each in turns with it."""
    found = []
    for (task, arm), makers in against_off(num_steps).items():
        arms = dict(zip(("off", arm), (partial(seconds_a_step, f, num_steps[task]) for f in makers), strict=True))
        rows = in_turns(arms, rounds)
        notes = {"what": f"whole runs of {num_steps[task]} steps on the {task} task; the first arm is the method's off"}
        tables.append(write(f"method_cost_{arm.lower()}_{task}{suffix}", rows, notes))
        # Named apart from the study's arm, which is against the baseline.
        found.append(row_of(task, rows[1], evidence.OFF.get(arm, "the same without it")))
    return found
