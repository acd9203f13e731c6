"""From the evidence studies and measured costs to `results/evidence.json`: `python -m benchmarks.evidence_summary`.

Time is steps times the median cost of a step in the runs of `method_cost`, which took turns with the baseline's; the
studies' own seconds are of a machine that did other work too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks import evidence
from benchmarks.measure import RESULTS
from cosmati.records.study import EvaluationPoint, StudyRecord, StudyRun
from cosmati.study.comparison import SpeedUp, speed_ups_at_equal_quality
from cosmati.study.runner import STUDY_FILE
from cosmati.study.statistics import Estimate, mean_estimate

METRICS = {"vision": ("accuracy", "", False), "language": ("bits per byte", "bits", True)}


def read_study(task: evidence.Task) -> StudyRecord:
    """Return a finished study."""
    return StudyRecord.from_json((evidence.RESULTS / task / STUDY_FILE).read_text())


def read_costs() -> dict[tuple[str, str], float]:
    """Return the cost of a run by task and arm, over the baseline's."""
    rows = json.loads((RESULTS / "method_cost.json").read_text())["rows"]
    return {(row["task"], row["method"]): row["ratio"] for row in rows if row["off"] == "baseline"}


def in_quiet_time(study: StudyRecord, ratios: Mapping[str, float]) -> StudyRecord:
    """Return the study with time counted in baseline steps: steps times what an arm's cost over the baseline's."""

    def timed(point: EvaluationPoint, arm: str) -> EvaluationPoint:
        return replace(point, seconds=point.step * ratios[arm])

    def changed(run: StudyRun) -> StudyRun:
        points = tuple(timed(point, run.arm) for point in run.points)
        return replace(run, points=points, final=timed(run.final, run.arm))

    return replace(study, runs=tuple(changed(run) for run in study.runs))


def difference(study: StudyRecord, arm: str, budget: float) -> tuple[float, float, Estimate]:
    """Return the means of baseline and arm at a budget, and the mean paired difference with its interval."""
    offset = evidence.AA_OFFSET if arm == "aa" else 0
    of = {(run.arm, run.seed): run.final.quality for run in study.runs if run.budget == budget}
    seeds = sorted(seed for name, seed in of if name == study.baseline_arm)
    base = [of[study.baseline_arm, seed] for seed in seeds]
    own = [of[arm, seed + offset] for seed in seeds]
    gaps = [b - a for a, b in zip(base, own, strict=True)]
    return sum(base) / len(base), sum(own) / len(own), mean_estimate(gaps)


def summarize(task: evidence.Task, costs: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Return one task's part of `evidence.json`."""
    study = read_study(task)
    metric, unit, lower_is_better = METRICS[task]
    arms = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    ratios = {"baseline": 1.0} | {arm: costs[task, arm] for arm in arms}
    timed = in_quiet_time(study, ratios)
    rows, speed_ups = [], []
    for arm in arms:
        for budget in evidence.BUDGETS:
            base, own, gap = difference(study, arm, budget)
            values = {"baseline": base, "value": own, "difference": gap.value, "low": gap.low, "high": gap.high}
            steps = round(budget * evidence.NUM_STEPS[task])
            rows.append({"method": arm, "budget": steps, "n": gap.n, **{k: _rounded(v) for k, v in values.items()}})
        best, by_steps = (
            speed_ups_at_equal_quality(record, arm, [None], axis="seconds")[0]
            for record in (timed, in_quiet_time(study, dict.fromkeys(ratios, 1.0)))
        )
        speed_ups.append(
            {
                "method": arm,
                "n": len(evidence.SEEDS[task]),
                **_speed_up(best),
                "steps_ratio": _speed_up(by_steps)["ratio"],
                "cost": ratios[arm],
            }
        )
    return {
        "metric": metric,
        "unit": unit,
        "lower_is_better": lower_is_better,
        "budgets": [round(b * evidence.NUM_STEPS[task]) for b in evidence.BUDGETS],
        "rows": rows,
        "speedup": speed_ups,
    }


def _speed_up(found: object) -> dict[str, float | None]:
    if not isinstance(found, SpeedUp):
        return {"ratio": None, "low": None, "high": None}
    return {"ratio": _rounded(found.ratio), "low": _rounded(found.low), "high": _rounded(found.high)}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)


def table(task: str, part: Mapping[str, Any]) -> str:
    """Return one task's part as Markdown: differences to the baseline at each budget, and the speed-up."""
    budgets = part["budgets"]
    better = "lower" if part["lower_is_better"] else "higher"
    base = {row["budget"]: row["baseline"] for row in part["rows"]}
    lines = [
        f"## {task}: {part['metric']}, {better} is better",
        "",
        f"Baseline: {', '.join(f'{base[b]:.4f} at {b} steps' for b in budgets)}. Differences to it, mean (95 %).",
        "",
        f"| arm | n | {' | '.join(f'{b} steps' for b in budgets)} | cost a step | speed-up by time (95 %), by steps |",
        f"|---|---|{'---|' * len(budgets)}---|---|",
    ]
    for speed_up in part["speedup"]:
        own = {row["budget"]: row for row in part["rows"] if row["method"] == speed_up["method"]}
        cells = [f"{own[b]['difference']:+.4f} ({own[b]['low']:+.4f} to {own[b]['high']:+.4f})" for b in budgets]
        ratio = "never reaches the baseline's best"
        if speed_up["ratio"] is not None:
            ends = ["open" if end is None else f"{end:.2f}" for end in (speed_up["low"], speed_up["high"])]
            ratio = f"{speed_up['ratio']:.2f} ({ends[0]} to {ends[1]})"
            ratio += "" if speed_up["steps_ratio"] is None else f", {speed_up['steps_ratio']:.2f}"
        lines.append(
            f"| {speed_up['method']} | {speed_up['n']} | {' | '.join(cells)} | {speed_up['cost']:.3f} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files, and print the tables."""
    costs = read_costs()
    tasks = {task: summarize(task, costs) for task in ("vision", "language")}  # type: ignore[arg-type]
    facts = {
        "hardware": read_study("vision").hardware,
        "command": "cosmati study run benchmarks/evidence.py:vision (and :language)",
        "tasks": tasks,
    }
    (RESULTS / "evidence.json").write_text(json.dumps(facts, indent=1) + "\n")
    text = "\n".join(table(task, part) for task, part in tasks.items())
    (RESULTS / "evidence.md").write_text(f"# Each method alone\n\nHardware: {facts['hardware']}.\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
