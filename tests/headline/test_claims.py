"""Every committed claim again from the committed runs, by a small computation of its own: NumPy, SciPy, no `cosmati`.

The model is that of docs/statistics.md: means over paired seeds, SciPy's monotone cubics over the logarithm of the
axis, time as steps at the profiled cost, Student's t, Satterthwaite's degrees of freedom, Holm. Only the error is found
another way than ours, which draws: by the derivative of the ratio's logarithm in each mean. Widths agree to a per cent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from benchmarks.headline import __main__ as driver
from cosmati.explorer.wording import number
from cosmati.records.headline import headline_from_json

Array = NDArray[np.float64]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CLAIMS: list[dict[str, Any]] = json.loads((RESULTS / "headline.json").read_text())
IDS = [f"{one['task']}-{one['opponent']}-{one['axis']}" for one in CLAIMS]
SMALLEST_P = 1e-15
STEP = 1e-6
"""Of a derivative."""


@cache
def study(task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "headline" / task / "study.json").read_text())
    return found


class Sample:
    """What one claim rests on: a table of runs for each arm, and the logarithm of a step's cost in each turn.

    Attributes:
        runs: by arm (opponent, composition): [seeds, 2 x budgets], logarithms of positions and then qualities.
        costs: by arm: [turns]; one turn of zeros where the axis isn't time.
    """

    def __init__(self, claim: dict[str, Any]) -> None:
        record = study(claim["task"])
        self.sign = 1.0 if record["higher_is_better"] else -1.0
        (opponent,) = (arm["name"] for arm in record["arms"] if arm["opponent"] == claim["opponent"])
        axis = "step" if claim["axis"] == "seconds" else claim["axis"]
        budgets = sorted({run["budget"] for run in record["runs"]})
        self.runs, self.costs = [], []
        for arm in (opponent, claim["arm"]):
            runs = {(run["seed"], run["budget"]): run["final"] for run in record["runs"] if run["arm"] == arm}
            rows = [
                [math.log(runs[seed, budget][axis]) for budget in budgets]
                + [self.sign * runs[seed, budget]["quality"] for budget in budgets]
                for seed in sorted({seed for seed, _ in runs})
            ]
            costs = [math.log(one["seconds"] / one["steps"]) for one in record["costs"] if one["arm"] == arm]
            self.runs.append(np.array(rows, dtype=np.float64))
            self.costs.append(np.array(costs if claim["axis"] == "seconds" else [0.0], dtype=np.float64))

    def log_ratio(self, runs: Sequence[Array], costs: Sequence[float]) -> float:
        """Return the logarithm of the opponent's need over the arm's, from means."""
        curves = []
        for means, cost in zip(runs, costs, strict=True):
            half = len(means) // 2
            curves.append((means[:half] + cost, means[half:]))
        target = curves[0][1].max()
        needs = [reach(*curve, target) for curve in curves]
        return needs[0] - needs[1]

    def means(self) -> tuple[list[Array], list[float]]:
        return [table.mean(axis=0) for table in self.runs], [float(logs.mean()) for logs in self.costs]


def reach(logs: Array, quality: Array, target: float) -> float:
    """Return where a curve first has a quality, its smallest budget's place where that is better already."""
    if quality[0] >= target:
        return float(logs[0])
    first = int(np.argmax(quality >= target))
    assert quality[first] >= target, "it never gets there"
    if quality[first] == target:
        return float(logs[first])
    curve = PchipInterpolator(logs, quality)
    return float(brentq(lambda at: float(curve(at)) - target, logs[first - 1], logs[first], xtol=1e-14))


def slopes(value: Callable[[Array], float], at: Array) -> Array:
    """Return the derivatives of a function, by differences to both sides."""
    found = []
    for index in range(len(at)):
        step = np.zeros_like(at)
        step[index] = STEP
        found.append((value(at + step) - value(at - step)) / (2 * STEP))
    return np.array(found)


def variance(influence: Array) -> float:
    """Return that of a mean."""
    return float(np.var(influence, ddof=1) / len(influence)) if len(influence) > 1 else 0.0


def errors(sample: Sample) -> tuple[float, float, int]:
    """Return the standard errors of the ratio's logarithm from seeds and from costs, and the degrees of freedom."""
    runs, costs = sample.means()
    width = len(runs[0])

    def by_runs(at: Array) -> float:
        return sample.log_ratio([at[:width], at[width:]], costs)

    def by_costs(at: Array) -> float:
        return sample.log_ratio(runs, at.tolist())

    of_seeds = variance(np.hstack(sample.runs) @ slopes(by_runs, np.concatenate(runs)))
    of_costs = variance(np.stack(sample.costs, axis=1) @ slopes(by_costs, np.array(costs)))
    dofs = len(sample.runs[0]) - 1, len(sample.costs[0]) - 1
    parts = [one**2 / dof for one, dof in zip((of_seeds, of_costs), dofs, strict=True) if dof]
    dof = math.floor((of_seeds + of_costs) ** 2 / sum(parts) + 1e-9) if sum(parts) else sum(dofs)
    return math.sqrt(of_seeds), math.sqrt(of_costs), dof


def is_bound(claim: dict[str, Any]) -> bool:
    """Return whether the arm's smallest budget is better than the quality already."""
    runs, _ = Sample(claim).means()
    half = len(runs[0]) // 2
    return bool(runs[1][half] > runs[0][half:].max())


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_the_ratio_is_that_of_the_runs(claim: dict[str, Any]) -> None:
    sample = Sample(claim)
    runs, costs = sample.means()
    assert len(sample.runs[0]) == claim["n"]
    ratio = math.exp(sample.log_ratio(runs, costs))
    assert number(ratio) == number(claim["speed_up"]), "as it's printed"
    assert ratio == pytest.approx(claim["speed_up"], rel=1e-9)
    quality = sample.sign * runs[0][len(runs[0]) // 2 :].max()
    assert quality == pytest.approx(claim["quality"], rel=1e-12)


@pytest.mark.parametrize("claim", CLAIMS, ids=IDS)
def test_the_interval_is_students_on_the_runs_error(claim: dict[str, Any]) -> None:
    of_seeds, of_costs, dof = errors(Sample(claim))
    error = math.hypot(of_seeds, of_costs)
    half = float(stats.t.ppf(0.975, dof)) * error
    # An end that is open has nothing measured beyond it.
    assert (claim["low"] is not None, claim["high"] is None) == (True, is_bound(claim))
    assert math.log(claim["speed_up"] / claim["low"]) == pytest.approx(half, rel=0.01, abs=1e-12)
    if claim["high"] is not None:
        assert math.log(claim["high"] / claim["speed_up"]) == pytest.approx(half, rel=0.01, abs=1e-12)


def own_p_value(claim: dict[str, Any]) -> float:
    """Return Student's, of the spread that the claim's interval says: in a far tail a per cent of it is a lot of p."""
    _, _, dof = errors(Sample(claim))
    half = math.log(claim["speed_up"] / claim["low"])
    if half < 1e-12:
        return SMALLEST_P
    t = math.log(claim["speed_up"]) / half * float(stats.t.ppf(0.975, dof))
    return max(SMALLEST_P, 2 * float(stats.t.sf(t, dof)))


@pytest.mark.parametrize("is_registered", [True, False])
def test_p_values_are_adjusted_in_their_family(is_registered: bool) -> None:
    family = [one for one in CLAIMS if one["is_registered"] is is_registered]
    assert {one["num_tests"] for one in family} == {len(family)}
    raw = [own_p_value(one) for one in family]
    for claim, own in zip(family, raw, strict=True):
        # Holm's: the largest, over the tests that are no less sure, of p times how many aren't surer.
        adjusted = max(p * sum(other >= p for other in raw) for p in raw if p <= own)
        assert claim["p"] == pytest.approx(min(1.0, adjusted), rel=1e-3)
        assert claim["level"] == (0.01 if is_registered else 0.05)


def test_families_are_what_was_registered() -> None:
    for claim in CLAIMS:
        registration = study(claim["task"])["registration"]
        opponents = {arm["name"]: arm["opponent"] for arm in study(claim["task"])["arms"]}
        predicted = {(one["arm"], opponents[one["opponent"]], one["axis"]) for one in registration["predictions"]}
        assert claim["is_registered"] == ((claim["arm"], claim["opponent"], claim["axis"]) in predicted)
        if claim["is_registered"]:
            assert claim["family"] == registration["family"]
    assert {(one["task"], one["opponent"], one["axis"]) for one in CLAIMS} == {
        (task, opponent, axis) for task in driver.TASKS for opponent in ("tuned", "plain") for axis in driver.AXES
    }


def test_the_file_is_what_the_project_makes_of_the_studies_now() -> None:
    made, _ = driver.claims_of_finished()
    committed = headline_from_json((RESULTS / "headline.json").read_text())
    assert len(made) == len(committed)
    for one, other in zip(made, committed, strict=True):
        for name in one.__dataclass_fields__:
            ours, theirs = getattr(one, name), getattr(other, name)
            assert ours == (pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs), name


def test_a_changed_run_would_be_seen() -> None:
    """The oracle reads the runs: where one of the opponent's is better, the arm gains less."""
    for claim in CLAIMS:
        sample = Sample(claim)
        runs, costs = sample.means()
        before = sample.log_ratio(runs, costs)
        sample.runs[0][0, -1] += 1e-3
        runs, costs = sample.means()
        assert is_bound(claim) or sample.log_ratio(runs, costs) < before - 1e-6
