"""What a study will take, and what it can show, before its first run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cosmati.records.study import SearchRecord, StudyRecord, StudyRun
from cosmati.study.comparison import SCREENING_LEVEL, SpeedUp, comparisons, level_of
from cosmati.study.definition import Study
from cosmati.study.inference import step_cost
from cosmati.study.noise import NOISE_ARM, is_double
from cosmati.study.statistics import seeds_needed

GAINS = (1.1, 1.25, 1.5)
POWER = 0.8


@dataclass(frozen=True)
class Spread:
    """By how much a ratio varies: standard errors of its logarithm.

    Attributes:
        seed: of one seed; n seeds have that over the root of n.
        cost: of the profiled costs, however many seeds there are.
        source: where it's from, in words.
    """

    seed: float
    cost: float
    source: str


def family_of(study: Study) -> tuple[int, float]:
    """Return how many tests are adjusted for each other, and at which level: those registered, or else a screening."""
    if study.registration is None:
        arms = {name: arm.record(name) for name, arm in study.arms.items() if name != study.baseline}
        base = study.arms[study.baseline].record(study.baseline)
        has_double = NOISE_ARM in arms and is_double(arms[NOISE_ARM], base)
        return max(1, len(arms) - has_double), SCREENING_LEVEL
    num_tests = study.registration.family_size
    return num_tests, level_of(num_tests)


def spread_of_study(study: StudyRecord) -> Spread | None:
    """Return the spread of an earlier study's ratios: by steps that of the seeds, and that of the costs beside it.

    None where no ratio of it has a closed interval.
    """
    found = [one for one in comparisons(study, axis="step") if _is_closed(one.found)]
    seeds = [one.found.error * math.sqrt(one.found.n) for one in found if isinstance(one.found, SpeedUp)]  # type: ignore[operator]
    if not seeds:
        return None
    costs = [step_cost(study, one.arm, study.baseline_arm) if study.costs else None for one in found]
    errors = [one.error for one in costs if one is not None and one.error is not None]
    return Spread(statistics.median(seeds), statistics.median(errors or [0.0]), f"the study {study.name}")


def _is_closed(found: object) -> bool:
    if not isinstance(found, SpeedUp) or found.low is None or found.high is None or found.error is None:
        return False
    return found.low > 0.0 and found.high < math.inf


def spread_of_trials(study: Study) -> Spread | None:
    """Return the spread that the searches' trials foretell: that of quality between seeds, over the curve's slope.

    The slope is that of the chosen points' mean quality by the logarithm of the budget, at its end. A ratio is of two
    arms, whose seeds are taken to be independent. None where no point was run on several seeds, or the curve is flat.
    """
    searches = [arm.search for arm in study.arms.values() if arm.search is not None]
    squares, freedom = 0.0, 0
    for search in searches:
        for values in _by_point(search).values():
            squares += sum((value - statistics.fmean(values)) ** 2 for value in values)
            freedom += len(values) - 1
    slopes = [slope for search in searches if (slope := _slope(search))]
    if not freedom or not slopes:
        return None
    error = math.sqrt(2 * squares / freedom) / statistics.median(slopes)
    return Spread(error, 0.0, "the search's trials")


def _by_point(search: SearchRecord) -> dict[tuple[int, float], list[float]]:
    """Return the finite qualities of each point at each budget."""
    found: dict[tuple[int, float], list[float]] = {}
    for one in search.trials:
        if math.isfinite(one.quality):
            found.setdefault((one.point, one.budget), []).append(one.quality)
    return found


def _slope(search: SearchRecord) -> float:
    """Return how much quality changes by the logarithm of the budget between the chosen point's two largest ones."""
    means = sorted(
        (budget, statistics.fmean(values))
        for (point, budget), values in _by_point(search).items()
        if point == search.chosen
    )
    if len(means) < 2:
        return 0.0
    (before, worse), (full, better) = means[-2:]
    return abs(better - worse) / math.log(full / before)


def full_run_seconds(
    study: Study, finished: Sequence[StudyRun] = (), like: StudyRecord | None = None
) -> dict[str, float]:
    """Return about how long a run at the full budget trains, for each arm of which anything is known.

    From finished runs, else trials of its search, else those of an arm with the same recipe, else the runs of an arm of
    its name in an earlier study. Time is taken to grow as the budget does.
    """
    known: dict[str, float] = {}
    for name, arm in study.arms.items():
        trials = arm.search.trials if arm.search else ()
        others = like.runs if like else ()
        for found in (
            [one.final.seconds / one.budget for one in finished if one.arm == name],
            [one.seconds / one.budget for one in trials if math.isfinite(one.quality)],
            [one.final.seconds / one.budget for one in others if one.arm == name],
        ):
            if found:
                known.setdefault(name, statistics.median(found))
    alike = {study.arms[name].recipe_text: seconds for name, seconds in known.items() if study.arms[name].recipe_text}
    return {
        n: known.get(n) or alike[arm.recipe_text]
        for n, arm in study.arms.items()
        if n in known or arm.recipe_text in alike
    }


def plan_lines(
    study: Study, *, finished: Sequence[StudyRun] = (), like: StudyRecord | None = None, jobs: int = 1
) -> Iterator[str]:
    """Say how many runs a study is, about how long they take, and how many seeds show which gain.

    Args:
        study: as it's asked for.
        finished: runs of it that are done.
        like: an earlier study of the same kind, for its spread and its times.
        jobs: how many runs at a time.
    """
    arms, budgets, seeds = len(study.arms), len(study.budgets), len(study.seeds)
    yield (
        f"{study.name}: {arms} arms x {budgets} budgets x {seeds} seeds = {arms * budgets * seeds} runs, which train "
        f"as long as {arms * seeds * sum(study.budgets):g} runs at the full budget. {len(finished)} are finished."
    )
    yield _time_line(study, full_run_seconds(study, finished, like), jobs)
    num_tests, level = family_of(study)
    what = f"{num_tests} {'test' if study.registration else 'comparison'}{'s' if num_tests > 1 else ''}"
    family = "Registered is a family of" if study.registration else "Nothing is registered: a screening of"
    yield f"{family} {what}, at p < {level} by Holm."
    spread = spread_of_study(like) if like else spread_of_trials(study)
    if spread is None:
        yield _no_spread_line(like)
        return
    yield (
        f"Seeds that show a gain in {POWER:.0%} of studies, where a seed's ratio varies by {100 * spread.seed:.2g} % "
        f"and costs by {100 * spread.cost:.2g} % ({spread.source}):"
    )
    for gain in GAINS:
        needed = seeds_needed(gain, spread.seed, spread.cost, num_tests, level, POWER)
        if needed is None:
            yield f"  {gain:g} times as fast: no number of them; profile the costs in more turns (cost_turns)"
        else:
            verdict = "enough here" if needed <= seeds else f"and here are {seeds}"
            yield f"  {gain:g} times as fast: {needed} ({verdict})"


def _no_spread_line(like: StudyRecord | None) -> str:
    if like is not None:
        return f"How many seeds it takes isn't known: no ratio of {like.name} has a closed interval."
    return (
        "How many seeds it takes isn't known: no point was searched on several seeds. Name an earlier study of the "
        "kind (--like study.json), or run a few seeds first."
    )


def _time_line(study: Study, seconds: dict[str, float], jobs: int) -> str:
    missing = sorted(set(study.arms) - set(seconds))
    if missing:
        return f"How long that takes isn't known: no run and no trial of {', '.join(missing)} is on record."
    runs = len(study.seeds) * sum(study.budgets) * sum(seconds.values()) / jobs
    budget = min(study.budgets) if study.cost_budget is None else study.cost_budget
    costs = (study.cost_turns + 1) * budget * sum(seconds.values()) if study.cost_turns else 0.0
    by_arm = ", ".join(f"{name} {_time(one)}" for name, one in seconds.items())
    profiles = f", and {_time(costs)} to profile costs" if costs else ""
    return f"About {_time(runs)} of training, {jobs} at a time{profiles}; evaluation is extra. A full run: {by_arm}."


def _time(seconds: float) -> str:
    unit, length = next(((u, s) for u, s in (("h", 3600.0), ("min", 60.0)) if seconds >= 2 * s), ("s", 1.0))
    return f"{seconds / length:.3g} {unit}"
