"""What makes a study's baseline a strong one, read from its trials and runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cosmati.records.study import ArmRecord, ChecklistItem, DimensionRecord, SearchRecord, StudyRecord
from cosmati.study.inference import step_cost
from cosmati.study.noise import NOISE_ARM, noise_arm
from cosmati.study.points import Dimension, chosen_settings
from cosmati.study.row_sample import COMMON_ROWS, shared_share

DATA_SHARE = 0.05
"""Of training time; what waits less for its data isn't held up by them."""
MAX_NAMED = 8
NO_TRAINING = ("evaluation", "checkpoint")
MIXED = ("bfloat16", "float16")
AS_FAST = 0.95
"""A step in mixed precision that takes more of a step in float32, by its whole interval, is no faster to speak of."""


@dataclass(frozen=True)
class SearchEffort:
    """What a search took: all of its runs, those of points that went no further too."""

    num_trials: int
    num_steps: int
    num_rows: int
    num_settings: int = 0
    """Distinct ones."""
    num_known: int = 0
    """Those of them that were known by hand."""
    num_failed: int = 0
    """Runs that raised an error."""


def effort_of(search: SearchRecord) -> SearchEffort:
    """Return what a search took."""
    trials = search.trials
    return SearchEffort(
        num_trials=len(trials),
        num_steps=sum(one.steps for one in trials),
        num_rows=sum(one.rows for one in trials),
        num_settings=search.num_settings,
        num_known=replace(search, trials=tuple(one for one in trials if one.is_known)).num_settings,
        num_failed=sum(bool(one.error) for one in trials),
    )


def is_as_hard(search: SearchRecord, other: SearchRecord) -> bool:
    """Return whether a search had as many runs at each budget as another one, and runs that are at least as long.

    Of runs of one budget the longest ones count, in steps or, where the batch size is searched, in rows: a run that
    diverged is short. Where budgets are training times, the arm whose rows cost less sees more of them. A setting
    that is run over and over is one, and a search has tried as many distinct ones as the other.
    """
    if search.num_settings < other.num_settings:
        return False
    if Counter(one.budget for one in search.trials) != Counter(one.budget for one in other.trials):
        return False
    if _longest(search, "steps") == _longest(other, "steps"):
        return True
    rows, others = _longest(search, "rows"), _longest(other, "rows")
    return all(rows[budget] >= others[budget] for budget in rows)


def _longest(search: SearchRecord, what: str) -> dict[float, int]:
    found: dict[float, int] = {}
    for one in search.trials:
        found[one.budget] = max(found.get(one.budget, 0), int(getattr(one, what)))
    return found


def checks_of(study: StudyRecord) -> tuple[ChecklistItem, ...]:
    """Return the demands on a strong baseline: those that its records answer, then the study's own others."""
    arms = {arm.name: arm for arm in study.arms}
    searches = {name: arm.search for name, arm in arms.items() if arm.search and arm.search.is_choice}
    derived = [_searched_as_hard(study, searches)]
    if len(searches) > 1:
        derived.append(_same_ranges(searches))
    if searches:
        derived += [_inside(searches), _seeds_apart(study, searches), _rows_apart(study, searches)]
    derived += [_noise(study), _predicted(study), _profiled(study), _decayed(arms[study.baseline_arm])]
    derived += [_mixed_precision(study, arms[study.baseline_arm]), _data_is_quick(study)]
    answered = {item.name for item in derived}
    return (*derived, *(item for item in study.checklist if item.name not in answered))


def _searched_as_hard(study: StudyRecord, searches: Mapping[str, SearchRecord]) -> ChecklistItem:
    base = searches.get(study.baseline_arm)
    notes = []
    for name, search in searches.items():
        effort = effort_of(search)
        over = "; ".join(range_text(one) for one in search.dimensions if len(one.choices) != 1)
        known = f", {effort.num_known} of them known by hand" if effort.num_known else ""
        failed = f", {effort.num_failed} of which failed" if effort.num_failed else ""
        notes.append(
            f"{name}: {effort.num_trials} runs{failed}, {effort.num_settings} settings{known}, {effort.num_steps:,} "
            f"steps, over {over}"
        )
    is_met = base is not None and all(is_as_hard(base, search) for search in searches.values())
    single = [arm.name for arm in study.arms if arm.search is not None and arm.name not in searches]
    notes += [f"the search of {name} had one setting, so nothing was tuned" for name in single]
    note = ". ".join(notes) or "no search is on record, so the settings are somebody's choice"
    if base is None and searches:
        note = f"{study.baseline_arm} wasn't searched, and these were. {note}"
    known = known_text({name: search.by_hand for name, search in searches.items() if search.is_known})
    note += f"; {known}" if known else ""
    return ChecklistItem("Opponent searched as hard as the arms", is_met, note)


def known_text(by_hand: Mapping[str, int]) -> str:
    """Return a clause on arms whose best settings were known before their search; empty where there are none.

    Args:
        by_hand: runs by hand that it took to find them, by arm; 0 where nobody counted.
    """
    if not by_hand:
        return ""
    counts = [f"about {count} trials for {name}" for name, count in by_hand.items() if count]
    found = f", found by hand ({', '.join(counts)})" if counts else ""
    return f"the best settings of {' and '.join(by_hand)} were known before the search{found}"


def range_text(one: DimensionRecord) -> str:
    """Return a dimension's name with its range or its choices."""
    where = ", ".join(one.choices) if one.choices else f"{one.low:.3g} to {one.high:.3g}"
    return f"{one.name} {where}" + (f" (widened {one.widened}x)" if one.widened else "")


def _same_ranges(searches: Mapping[str, SearchRecord]) -> ChecklistItem:
    seen: dict[str, tuple[str, DimensionRecord]] = {}
    shared, unequal = set(), []
    for arm, search in searches.items():
        for one in search.dimensions:
            if one.name in seen:
                shared.add(one.name)
                other, same = seen[one.name]
                if same != one:
                    unequal.append(f"{other} {range_text(same)} and {arm} {range_text(one)}")
            seen.setdefault(one.name, (arm, one))
    note = "; ".join(unequal) or f"{', '.join(sorted(shared)) or 'nothing'} in common"
    return ChecklistItem("Shared settings searched over the same ranges", not unequal, note)


def _inside(searches: Mapping[str, SearchRecord]) -> ChecklistItem:
    at_edge = []
    for arm, search in searches.items():
        chosen = chosen_settings(search)
        at_edge += [
            f"{arm}: {one.name} = {chosen[one.name]}" for one in search.dimensions if is_at_edge(one, chosen[one.name])
        ]
    note = f"at an edge are {'; '.join(at_edge)}" if at_edge else "or at an end beyond which there is nothing"
    return ChecklistItem("Optimum inside of what was searched", not at_edge, note)


def is_at_edge(one: DimensionRecord, value: object) -> bool:
    """Return whether a setting lies at an edge beyond which more could be searched."""
    if one.choices:
        # Choices are kept as words, which 1 and 1.0 have two of.
        places = [at for at, choice in enumerate(one.choices) if choice in (str(value), str(_as_float(value)))]
        last = len(one.choices) - 1
        return any((not one.ends_below and at == 0) or (not one.ends_above and at == last) for at in places)
    widest = (-math.inf, math.inf)
    dimension = Dimension(name=one.name, low=one.low, high=one.high, is_log=one.is_log, widest=widest)
    place = _as_float(value)
    if not one.low <= place <= one.high:
        return False
    return (not one.ends_below and dimension.is_at("below", place)) or (
        not one.ends_above and dimension.is_at("above", place)
    )


def _as_float(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return math.nan


def _seeds_apart(study: StudyRecord, searches: Mapping[str, SearchRecord]) -> ChecklistItem:
    chosen_on = {trial.seed for search in searches.values() for trial in search.trials}
    both = sorted(chosen_on & {run.seed for run in study.runs})
    seeds = ", ".join(map(str, sorted(chosen_on)))
    note = f"searched on seed {seeds}" + (f"; reported too: {', '.join(map(str, both))}" if both else "")
    return ChecklistItem("Settings chosen on seeds of their own", not both, note)


def _rows_apart(study: StudyRecord, searches: Mapping[str, SearchRecord]) -> ChecklistItem:
    """Compare the rows that settings were chosen on with those that are reported, by samples of both."""
    name = "Settings chosen on rows of their own"
    shares = {arm: shared_share(search.evaluated_on, study.evaluated_on) for arm, search in searches.items()}
    unknown = [arm for arm, share in shares.items() if share is None]
    common = {arm: share for arm, share in shares.items() if share is not None and share > COMMON_ROWS}
    notes = [f"about {100 * share:.0f} % of the rows for {arm} are reported too" for arm, share in common.items()]
    why = "no record of the rows of its runs, or too few of them to compare"
    notes += [f"not known for {', '.join(unknown)}: {why}"] if unknown else []
    most = max((share for share in shares.values() if share is not None), default=0.0)
    note = "; ".join(notes) or f"at most {100 * most:.0f} % in common, by a sample of the rows' digests"
    return ChecklistItem(name, not notes, note)


def _noise(study: StudyRecord) -> ChecklistItem:
    seeds: dict[str, set[int]] = {NOISE_ARM: set(), study.baseline_arm: set()}
    for run in study.runs:
        if run.arm in seeds and math.isfinite(run.final.quality):
            seeds[run.arm].add(run.seed)
    is_met = False
    if not noise_arm(study):
        note = f"there is no arm {NOISE_ARM!r} that is the baseline with other seeds"
    elif not seeds[NOISE_ARM]:
        note = f"{NOISE_ARM!r} has no finished run"
    elif seeds[NOISE_ARM] & seeds[study.baseline_arm]:
        note = f"{NOISE_ARM!r} has the baseline's own seeds"
    else:
        is_met, note = True, "the baseline stands against itself with other seeds"
    return ChecklistItem("Noise floor measured", is_met, note)


def _predicted(study: StudyRecord) -> ChecklistItem:
    found = study.registration
    if found is None:
        return ChecklistItem("Predicted before the runs", met=False, note="nothing was registered")
    note = (
        f"{len(found.predictions)} of the {found.family_size} tests of the family {found.family!r}, {found.date}, "
        f"SHA-256 {found.digest[:12]}"
    )
    return ChecklistItem("Predicted before the runs", met=True, note=note)


def _profiled(study: StudyRecord) -> ChecklistItem:
    name = "Costs profiled alone, in turns"
    missing = [arm.name for arm in study.arms if arm.name not in {one.arm for one in study.costs}]
    if missing:
        note = f"not for {', '.join(missing)}" if study.costs else "times are the seconds of the runs themselves"
        return ChecklistItem(name, met=False, note=note)
    return ChecklistItem(name, met=True, note=f"{len({one.turn for one in study.costs})} turns of all arms")


def training_parts(study: StudyRecord, arm: str) -> dict[str, float]:
    """Return the mean seconds of each part of training over an arm's runs at its largest budget.

    Evaluation and checkpoints are no training; runs that diverged, and those of records without parts, have none.
    """
    runs = [run for run in study.runs if run.arm == arm and run.seconds_by_part]
    largest = [run for run in runs if run.budget == max(one.budget for one in runs)]
    names = dict.fromkeys(name for run in largest for name in run.seconds_by_part if name not in NO_TRAINING)
    return {name: sum(run.seconds_by_part.get(name, 0.0) for run in largest) / len(largest) for name in names}


def data_shares(study: StudyRecord) -> dict[str, float]:
    """Return for each arm which share of training at its largest budget passes in waiting for data."""
    found = {arm.name: training_parts(study, arm.name) for arm in study.arms}
    return {arm: parts.get("data", 0.0) / sum(parts.values()) for arm, parts in found.items() if sum(parts.values())}


def _data_is_quick(study: StudyRecord) -> ChecklistItem:
    name, shares = "Data loading isn't the bottleneck", data_shares(study)
    missing = [arm.name for arm in study.arms if arm.name not in shares]
    if missing:
        return ChecklistItem(name, met=False, note=f"time by part isn't measured for {', '.join(missing)}")
    high = {arm: share for arm, share in shares.items() if share >= DATA_SHARE}
    text = "reading rows and changing them, as a share of training time at the largest budget: "
    if len(shares) <= MAX_NAMED:
        return ChecklistItem(name, not high, text + shares_text(shares))
    most = max((share for arm, share in shares.items() if arm not in high), default=0.0)
    rest = f"{len(shares) - len(high)} arms at most {100 * most:.1f} %"
    return ChecklistItem(name, not high, text + "; ".join(filter(None, (shares_text(high), rest))))


def shares_text(shares: Mapping[str, float]) -> str:
    """Return shares in percent with the arms that have them."""
    return ", ".join(f"{arm} {100 * share:.1f} %" for arm, share in shares.items())


def _mixed_precision(study: StudyRecord, baseline: ArmRecord) -> ChecklistItem:
    """Read the precision from the baseline's recipe, and where that isn't mixed, what an arm that is mixed costs."""
    name = "Mixed precision"
    precision = _precision(baseline.recipe_text)
    if precision is None:
        return ChecklistItem(name, met=False, note="the baseline's recipe text doesn't name its precision")
    if precision in MIXED:
        return ChecklistItem(name, met=True, note=precision)
    own = _without_precision(baseline.recipe_text)
    for arm in study.arms:
        mixed = _precision(arm.recipe_text)
        if mixed not in MIXED or _without_precision(arm.recipe_text) != own:
            continue
        found = step_cost(study, arm.name, baseline.name)
        if found is not None and found.low is not None and found.high is not None:
            text = f"a step in {mixed} ({arm.name}) takes {found.value:.2f} of it ({found.low:.2f} to {found.high:.2f})"
            return ChecklistItem(name, met=found.low > AS_FAST, note=f"{precision}; {text}, n = {found.n}")
    return ChecklistItem(name, met=False, note=f"{precision}, and no arm shows that mixed precision is no faster here")


def _precision(recipe_text: str) -> str | None:
    config = _recipe(recipe_text).get("config")
    return str(config["precision"]) if isinstance(config, dict) and "precision" in config else None


def _without_precision(recipe_text: str) -> dict[str, object]:
    """Return a recipe without its precision and its name."""
    recipe = _recipe(recipe_text)
    config = {key: value for key, value in recipe["config"].items() if key not in ("precision", "name")}
    return {**recipe, "name": "", "config": config}


_SCHEDULE = re.compile(r"schedule=(\w+)\(([^()]*)\)")
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_TIME = re.compile(rf"(\w+)='({_NUMBER})([a-z]+)'")
_FINAL = re.compile(rf"final=({_NUMBER})(?=,|$)")


def _decayed(baseline: ArmRecord) -> ChecklistItem:
    """Read from the text of the baseline's recipe whether its schedules end at zero whatever the budget."""
    name = "Schedule fully decayed at every budget"
    optimizers = _optimizers(baseline.recipe_text)
    if not optimizers:
        return ChecklistItem(name, met=False, note="the baseline's recipe text doesn't name its optimizers")
    found = [(text, _SCHEDULE.search(text)) for text in optimizers]
    is_met = all(text.startswith("ScheduleFree") or (one and _ends_at_zero(*one.groups())) for text, one in found)
    notes = [f"{one[1]}({one[2]})" if one else text.partition("(")[0] for text, one in found]
    return ChecklistItem(name, is_met, "; ".join(dict.fromkeys(notes)))


def _optimizers(recipe_text: str) -> list[str]:
    optimizers = _recipe(recipe_text).get("optimizers")
    return [str(one) for one in optimizers] if isinstance(optimizers, list) else []


def _recipe(recipe_text: str) -> dict[str, Any]:
    """Read a recipe's text; empty where it isn't one of `Recipe.text`."""
    try:
        recipe = json.loads(recipe_text)
    except json.JSONDecodeError:
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _ends_at_zero(schedule: str, options: str) -> bool:
    times = {name: (float(length), unit) for name, length, unit in _TIME.findall(options)}
    is_dilated = len(times) == len(re.findall(r"='\d", options)) and all(
        unit == "dur" or length == 0 for length, unit in times.values()
    )
    decays = schedule in ("Linear", "Cosine") or (schedule == "WSD" and times.get("decay", (0.0, ""))[0] > 0)
    final = _FINAL.search(options)
    is_finished = times.get("t_max", (1.0, ""))[0] <= 1
    return decays and is_dilated and is_finished and final is not None and float(final[1]) == 0
