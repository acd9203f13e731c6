"""Synthetic studies with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cosmati.records.study import ArmRecord, ChecklistItem, EvaluationPoint, StudyRecord, StudyRun

BUDGETS = (0.25, 0.5, 0.75, 1.0)
SECONDS = 1000.0


def point(step: float, seconds: float, quality: float) -> EvaluationPoint:
    return EvaluationPoint(int(step), seconds, quality, int(step) * 32, 0, step * 1e9)


def run(arm: str, budget: float, seed: int, quality: float, *, pace: float = 1.0) -> StudyRun:
    """One run; `pace` multiplies its time at an equal number of steps."""
    seconds = SECONDS * budget * pace
    path = tuple(point(1000 * budget * s, seconds * s, quality * (0.6 + 0.4 * s)) for s in (0.25, 0.5, 1.0))
    final = point(1000 * budget, seconds, quality)
    parts = {"data": 0.05, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "evaluation": 0.05}
    return StudyRun(
        arm,
        budget,
        seed,
        f"{arm}-{budget}-{seed}",
        path,
        final,
        {name: seconds * s for name, s in parts.items()},
    )


def study(
    quality: dict[str, Callable[[float, int], float]],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    budgets: Sequence[float] = BUDGETS,
    pace: dict[str, float] | None = None,
    methods: dict[str, tuple[str, ...]] | None = None,
    higher_is_better: bool = True,
    name: str = "synthetic",
) -> StudyRecord:
    """A study whose arm `a` reaches `quality[a](budget, seed)`; the arm `aa` has seeds of its own."""
    runs = []
    for arm, reached in quality.items():
        for budget in budgets:
            chosen = [seed + 100 for seed in seeds] if arm == "aa" else seeds
            factor = (pace or {}).get(arm, 1.0)
            runs += [run(arm, budget, seed, reached(budget, seed), pace=factor) for seed in chosen]
    arms = tuple(ArmRecord(arm, f"The {arm} arm", '{"lr": 0.1}', (methods or {}).get(arm, ())) for arm in quality)
    return StudyRecord(
        name=name,
        task="Digits, small network",
        quality_name="accuracy" if higher_is_better else "loss",
        higher_is_better=higher_is_better,
        unit="",
        baseline_arm="baseline",
        arms=arms,
        runs=tuple(runs),
        checklist=(ChecklistItem("learning rate searched", True, "20 trials an arm"),),
        hardware="one CPU core",
        price_per_hour=0.5,
        command="cosmati study run study.yaml",
        notes="",
    )


def log_quality(gain: float = 0.0, *, top: float = 0.9, slope: float = 0.1) -> Callable[[float, int], float]:
    """Quality linear in log(budget), so that a gain of `slope * log(r)` is a speed-up of exactly r."""
    return lambda budget, seed: top + slope * math.log(budget) + gain + 0.001 * ((seed * 7) % 5 - 2)
