"""What a search of compositions found: in words, with what each part seems worth, and as a recipe's file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from cosmati.records.study import CostProfile, SearchRecord, Setting, TrialRecord, settings_key
from cosmati.study.checks import effort_of, is_at_edge
from cosmati.study.points import PointSettings
from cosmati.study.statistics import Estimate, mean_estimate, student_p_value, student_quantile

LEVEL = 0.95


@dataclass(frozen=True)
class PartWorth:
    """What a part seems worth: exploratory, from points that were run to choose among them.

    Attributes:
        part: Its name.
        num_with: Compositions with it that were run at the smallest budget and didn't diverge.
        num_without: The same without it.
        difference: Mean quality with it less that without it, by Welch's t (1947, doi:10.2307/2332510); None where
            either has none, and without an interval where either has one.
    """

    part: str
    num_with: int
    num_without: int
    difference: Estimate | None


@dataclass(frozen=True, kw_only=True)
class FoundComposition:
    """What a search of compositions found, and all that it took.

    Attributes:
        pool: Name of the pool.
        quality: Name of the metric that counts.
        higher_is_better: Whether a higher metric is the better one.
        chosen: Settings of the best point: each part on or off, and the settings of parts.
        relative_cost: Seconds of a step of it over nothing's, as profiled.
        search: All runs of the search. The settings of parts that are off don't matter.
        profiles: Of all compositions, in all turns; there was one more, to warm up.
        refused: Compositions that can't be trained, each with the reason.
    """

    pool: str
    quality: str
    higher_is_better: bool
    chosen: PointSettings
    relative_cost: float
    search: SearchRecord
    profiles: tuple[CostProfile, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def num_profiled(self) -> int:
        """Short runs that profiled costs, those that warmed up too."""
        return len(self.profiles) + len({one.arm for one in self.profiles})


def composition_text(settings: PointSettings) -> str:
    """Return the parts that are on, with their searched settings: `mixup(alpha=0.3) + cutout`, or `nothing`."""
    found = []
    for name in (name for name, is_on in settings.items() if "." not in name and is_on):
        own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
        options = ", ".join(f"{key}={_short(value)}" for key, value in own.items())
        found.append(f"{name}({options})" if options else name)
    return " + ".join(found) or "nothing"


def part_worths(found: FoundComposition) -> tuple[PartWorth, ...]:
    """Compare compositions with and without each part, at the smallest budget, where all were run."""
    smallest = min(one.budget for one in found.search.trials)
    points = {settings_key(one.settings): one.settings for one in found.search.trials}
    means = [(settings, _mean_quality(found, settings, smallest)) for settings in points.values()]
    worths = []
    for part in (name for name in found.chosen if "." not in name):
        groups = [[q for settings, q in means if settings[part] is on and math.isfinite(q)] for on in (True, False)]
        worths.append(PartWorth(part, len(groups[0]), len(groups[1]), mean_difference(*groups)))
    return tuple(worths)


def mean_difference(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Return the difference of two samples' means with Welch's interval; None where a sample is empty."""
    if not first or not second:
        return None
    one, other = mean_estimate(first), mean_estimate(second)
    n, value = min(one.n, other.n), one.value - other.value
    if one.error is None or other.error is None:
        return Estimate(value, None, None, n)
    squares = one.error**2, other.error**2
    error = math.sqrt(sum(squares))
    if error == 0.0:
        return Estimate(value, value, value, n, None, 0.0)
    freedom = error**4 / (squares[0] ** 2 / (one.n - 1) + squares[1] ** 2 / (other.n - 1))
    dof = max(1, math.floor(freedom + 1e-9))
    half = student_quantile(LEVEL, dof) * error
    return Estimate(value, value - half, value + half, n, student_p_value(value / error, dof), error)


def found_lines(found: FoundComposition) -> list[str]:
    """Return in lines what was chosen, what it took, what each part seems worth, and what can't be trained."""
    effort, trials = effort_of(found.search), found.search.trials
    full = max(one.budget for one in trials)
    num_points = len({one.point for one in trials})
    seeds = ", ".join(str(seed) for seed in sorted({one.seed for one in trials}))
    num_diverged = sum(not math.isfinite(one.quality) for one in trials)
    best = _short(_mean_quality(found, found.chosen, full))
    chosen = (
        f"chosen: {composition_text(found.chosen)}, the best of {num_points} at equal time: {found.quality} {best} at "
        f"budget {full:g} (seed {seeds}); a step of it takes {found.relative_cost:.2f} times as long as nothing's"
    )
    counted = (
        f"counted: {effort.num_trials} runs, {num_diverged} of which diverged, {effort.num_steps:,} steps, "
        f"{sum(one.seconds for one in trials):.1f} s; and {found.num_profiled} short ones that profiled costs"
    )
    lines = [chosen, _beside_nothing(found), counted]
    lines += [
        f"at the edge of its range: {one.name} = {_short(found.chosen[one.name])}. Widen it and search again."
        for one in found.search.dimensions
        if found.chosen.get(one.name.partition(".")[0]) and is_at_edge(one, found.chosen[one.name])
    ]
    better = "higher" if found.higher_is_better else "lower"
    lines.append(f"exploratory, {found.quality} with a part less that without it, {better} is better:")
    lines += [f"  {_worth_text(one)}" for one in part_worths(found)]
    lines += [f"not trained: {what}: {reason}" for what, reason in found.refused]
    return [*lines, "It was chosen among many by these runs, which flatters it: show it in a study of its own."]


def _beside_nothing(found: FoundComposition) -> str:
    """Return what both reached at the largest budget at which both were run, and how long they took."""
    if not any(is_on is True for name, is_on in found.chosen.items() if "." not in name):
        return "no part is worth its time here"
    nothing = next(one.settings for one in found.search.trials if composition_text(one.settings) == "nothing")
    budgets = [{one.budget for one in _trials_of(found, settings)} for settings in (found.chosen, nothing)]
    largest = max(budgets[0] & budgets[1])
    mine, other = (_mean_quality(found, settings, largest) for settings in (found.chosen, nothing))
    seconds = [
        sum(one.seconds for one in _trials_of(found, settings) if one.budget == largest)
        for settings in (found.chosen, nothing)
    ]
    return (
        f"beside nothing at budget {largest:g}: {_short(mine)} and {_short(other)}, in {seconds[0]:.1f} and "
        f"{seconds[1]:.1f} s"
    )


def _worth_text(worth: PartWorth) -> str:
    count = f"{worth.num_with} with it, {worth.num_without} without"
    if worth.difference is None:
        return f"{worth.part}: unknown ({count})"
    one = worth.difference
    interval = "" if one.low is None or one.high is None else f"95 % {one.low:+.3g} to {one.high:+.3g}, "
    return f"{worth.part}: {one.value:+.3g} ({interval}{count})"


def _trials_of(found: FoundComposition, settings: PointSettings) -> list[TrialRecord]:
    return [one for one in found.search.trials if one.settings == settings]


def _mean_quality(found: FoundComposition, settings: PointSettings, budget: float) -> float:
    values = [one.quality for one in _trials_of(found, settings) if one.budget == budget]
    return sum(values) / len(values)


def _short(value: Setting) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


_FILE = Template(
    '''"""$words.

Found by a search of compositions; train it with `cosmati train $name`.
"""

from pathlib import Path

from cosmati.study.compose import composed
from cosmati.study.python_file import load_module

POOL = Path(__file__).parent / $source
CHOSEN = $chosen
RELATIVE_COST = $cost  # seconds of a step over those of a step without any part: it does as many fewer steps
SEED = $seed


def recipe():
    """Return the composition at the full budget."""
    return composed(load_module(POOL).$function(), CHOSEN, $budget / RELATIVE_COST, SEED)
'''
)


def recipe_file(found: FoundComposition, path: Path, source: Path, function: str) -> str:
    """Return the text of a Python file whose `recipe()` is the composition that was found, as it was measured.

    Args:
        found: what was found.
        path: where the file will be; it finds the pool from there.
        source: the pool's Python file.
        function: the function in it that returns the pool.
    """
    trials = found.search.trials
    return _FILE.substitute(
        words=f"Of the pool {found.pool}: {composition_text(found.chosen)}".replace("\\", " ").replace('"', "'"),
        name=path.name,
        source=repr(Path(os.path.relpath(source.resolve(), path.resolve().parent)).as_posix()),
        chosen=repr(dict(found.chosen)),
        cost=repr(found.relative_cost),
        seed=trials[0].seed,
        budget=repr(max(one.budget for one in trials)),
        function=function,
    )
