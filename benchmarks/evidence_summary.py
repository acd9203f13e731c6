"""From the evidence studies and measured costs to `results/evidence.json`: `python -m benchmarks.evidence_summary`.

The profiles of `method_cost`, which took turns, are put into the records of the two studies that have none of their
own: those runs' own seconds are of a machine that did other work too. With `--check` nothing is written, and records
and results that don't fit together are an error.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import evidence, evidence_as_used
from benchmarks.measure import RESULTS
from cosmati.explorer.wording import claims_of, noise_sentences, ratio_interval_text, ratio_text
from cosmati.records.study import CostProfile, StudyRecord
from cosmati.study.comparison import Comparison, SpeedUp, comparisons
from cosmati.study.curves import Axis, mean_costs, paired_means
from cosmati.study.runner import STUDY_FILE
from cosmati.study.statistics import Estimate, estimate

STUDIES = ("vision", "language", evidence_as_used.FOLDER.name)
METHOD_OF: Mapping[str, str] = {
    evidence.NOT_UNDONE: "LabelSmoothing",
    evidence_as_used.UNDONE: "LabelSmoothing",
    evidence.DECAYING_SWA: "SWA",
    evidence_as_used.CONSTANT_SWA: "SWA",
}
"""Of an arm whose name says how its method is used; any other is named like its method."""
AXES: Mapping[Axis, str] = {"seconds": "time", "step": "steps"}
NUM_ROUNDS = 3


def path_of(name: str) -> Path:
    """Return where a study's record lies."""
    return evidence.RESULTS / name / STUDY_FILE


def read_study(name: str) -> StudyRecord:
    """Return a finished study."""
    return StudyRecord.from_json(path_of(name).read_text())


def rounds_of(row: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[float, ...]:
    """Return an arm's microseconds a step in three rounds, in the order of the baseline's from the fastest on.

    Quartiles of three values are the values; which round each is of follows from the ratios, which are by round.
    """
    parts = ("lower_quartile", "median", "upper_quartile")
    own, others = ([one[f"{part}_us"] for part in parts] for one in (row, base))
    ratios = [row[name] for name in ("ratio_lower_quartile", "ratio", "ratio_upper_quartile")]

    def error(order: tuple[float, ...]) -> float:
        found = sorted(mine / other for mine, other in zip(order, others, strict=True))
        return max(abs(one - ratio) for one, ratio in zip(found, ratios, strict=True))

    best = min(itertools.permutations(own), key=error)
    assert row["num_rounds"] == NUM_ROUNDS, "of more rounds quartiles are no values"
    assert error(best) < 1e-9, f"{row['arm']}: no order of the rounds has these ratios"
    return best


def with_profiles(study: StudyRecord, rows: list[Mapping[str, Any]]) -> StudyRecord:
    """Return the study with the rows of its `method_cost` file as profiles of its arms' costs, by round."""
    by_method = {row["arm"]: row for row in rows}
    smallest = min(run.budget for run in study.runs)
    costs = []
    for arm in study.arms:
        # A whole run's seconds were divided by the steps of the baseline's.
        [steps] = {run.final.step for run in study.runs if (run.arm, run.budget) == (study.baseline_arm, smallest)}
        found = rounds_of(by_method[METHOD_OF.get(arm.name, arm.name)], by_method[study.baseline_arm])
        costs += [CostProfile(arm.name, turn, steps, us * steps / 1e6) for turn, us in enumerate(found)]
    return replace(study, costs=tuple(costs))


def profiled(name: str) -> StudyRecord:
    """Return a study with profiled costs, its own or those of `method_cost`."""
    study = read_study(name)
    cost_file = RESULTS / f"method_cost_{name}.json"
    return with_profiles(study, json.loads(cost_file.read_text())["rows"]) if cost_file.exists() else study


def differences(study: StudyRecord, arm: str) -> list[tuple[float, float, Estimate]]:
    """Return for each budget the means of baseline and arm, and their difference with its interval."""
    base, own = paired_means(study, [study.baseline_arm, arm], axis="step")
    sign = 1.0 if study.higher_is_better else -1.0
    values = [sign * np.stack([base.quality[:, i], own.quality[:, i]]) for i in range(base.quality.shape[1])]
    return [(float(b[0]), float(o[0]), estimate(o - b, base.n, base.freedom)) for b, o in values]


def summarize(study: StudyRecord) -> dict[str, Any]:
    """Return one study's part of `evidence.json`."""
    arms = [arm.name for arm in study.arms if arm.name != study.baseline_arm]
    budgets = sorted({run.final.step for run in study.runs if run.arm == study.baseline_arm})
    costs = mean_costs(study, "seconds")
    rows = []
    for arm in arms:
        for steps, (base, own, gap) in zip(budgets, differences(study, arm), strict=True):
            values = {"baseline": base, "value": own, "difference": gap.value, "low": gap.low, "high": gap.high}
            rows.append({**_names(arm), "budget": steps, "n": gap.n, **{k: _rounded(v) for k, v in values.items()}})
    judged: dict[str, dict[str, Any]] = {}
    # Without profiles time is that of runs beside whatever else the machine did.
    axes = [axis for axis in AXES if axis != "seconds" or costs]
    for axis in axes:
        claims = {claim.arm: claim for claim in claims_of(study, axis=axis)}
        for one in comparisons(study, axis=axis):
            said = {"verdict": claims[one.arm].verdict, "sentence": claims[one.arm].sentence}
            judged.setdefault(one.arm, {})[axis] = {**_speed_up(one), **said}
    return {
        "metric": study.quality_name,
        "lower_is_better": not study.higher_is_better,
        "hardware": study.hardware,
        "command": study.command,
        "noise": list(noise_sentences(study, axis=axes[0])),
        "budgets": budgets,
        "cost": {arm: _rounded(costs[arm] / costs[study.baseline_arm]) for arm in arms if arm in costs},
        "rows": rows,
        "speedup": [{**_names(arm), **found} for arm, found in judged.items()],
    }


def _names(arm: str) -> dict[str, str]:
    return {"method": METHOD_OF.get(arm, arm), "arm": arm}


def _speed_up(one: Comparison) -> dict[str, Any]:
    found = one.found
    if not isinstance(found, SpeedUp):
        return {"ratio": None, "low": None, "high": None, "p": None, "level": one.level, "text": "—"}
    text = f"{ratio_text(found)} ({ratio_interval_text(found)})".replace("\u00a0", " ")
    figures = {"ratio": found.ratio, "low": found.low or None, "high": found.high, "p": one.p_value}
    return {**{name: _rounded(value) for name, value in figures.items()}, "level": one.level, "text": text}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)


def table(name: str, part: Mapping[str, Any]) -> str:
    """Return one study's part as Markdown: differences to the baseline at each budget, and what is said of each arm."""
    budgets = part["budgets"]
    base = {row["budget"]: row["baseline"] for row in part["rows"]}
    means = ", ".join(f"{base[b]:.4f} at {b} steps" for b in budgets)
    judged = {one["arm"]: one for one in part["speedup"]}
    lines = [
        f"## {name}: {part['metric']}, {'lower' if part['lower_is_better'] else 'higher'} is better",
        "",
        f"`{part['command']}`; {part['hardware']}.",
        "",
        f"Baseline: {means}. Differences to it, mean (95 %, each by itself).",
        "",
        f"| arm | n | {' | '.join(f'{b} steps' for b in budgets)} | cost a step |",
        f"|---|---|{'---|' * len(budgets)}---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in part["rows"]):
        own = {row["budget"]: row for row in part["rows"] if row["arm"] == arm}
        cells = [f"{own[b]['difference']:+.4f} ({_end(own[b]['low'])} to {_end(own[b]['high'])})" for b in budgets]
        cost = f"{part['cost'][arm]:.3f}" if arm in part["cost"] else "not profiled"
        lines.append(f"| {arm} | {own[budgets[0]]['n']} | {' | '.join(cells)} | {cost} |")
    axes = [axis for axis in AXES if any(axis in one for one in judged.values())]
    heads = [f"by {AXES[axis]} (95 %, n) | adjusted p | verdict by {AXES[axis]}" for axis in axes]
    lines += [
        "",
        "Times as fast to the baseline's best, or where an arm doesn't get there to its own best:",
        "",
        f"| arm | {' | '.join(heads)} |",
        f"|---|{'---|' * 3 * len(axes)}",
    ]
    for arm, one in judged.items():
        cells = [f"{one[axis]['text']} | {_p(one[axis]['p'])} | {one[axis]['verdict']}" for axis in axes]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *part["noise"]]) + "\n"


def _end(value: float | None) -> str:
    return "open" if value is None else f"{value:+.4f}"


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def main(arguments: list[str]) -> int:
    """Write or check records, `evidence.json` and `evidence.md`; return the exit status."""
    studies = {name: profiled(name) for name in STUDIES if path_of(name).exists()}
    tasks = {name: summarize(study) for name, study in studies.items()}
    text = "\n".join(table(name, part) for name, part in tasks.items())
    texts = {
        RESULTS / "evidence.json": json.dumps({"tasks": tasks}, indent=1, ensure_ascii=False) + "\n",
        RESULTS / "evidence.md": f"# Each method alone\n\n{text}",
    }
    stale = [path for path, new in texts.items() if path.read_text() != new]
    for name, study in studies.items():
        if read_study(name).costs != study.costs:
            texts[path_of(name)] = study.to_json()
            stale.append(path_of(name))
    if arguments == ["--check"]:
        if stale:
            names = ", ".join(str(path.relative_to(RESULTS)) for path in stale)
            print(f"{names}: not what the records say. Run: python -m benchmarks.evidence_summary")
        return int(bool(stale))
    for path in stale:
        path.write_text(texts[path])
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
