"""Numbers, intervals and claims as text. Each carries its n and its interval, or says why it has none."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import cast

from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.checks import effort_of, is_as_hard, known_text
from cosmati.study.comparison import (
    Comparison,
    NotReached,
    SpeedUp,
    comparisons,
    noise_floor,
)
from cosmati.study.curves import Axis
from cosmati.study.divergence import left_out, num_diverged
from cosmati.study.noise import NOISE_ARM
from cosmati.study.predictions import outcomes_of
from cosmati.study.statistics import Estimate, best_of, seeds_needed

AXIS_NAMES: dict[Axis, str] = {
    "seconds": "training time",
    "cpu_seconds": "CPU time",
    "step": "steps",
    "rows": "rows",
    "tokens": "tokens",
    "flops": "FLOPs",
}
_SMALL_GAIN, _POWER, _MANY_SEEDS = 1.1, 0.8, 100
_SECONDS_A_UNIT = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True)
class Claim:
    """What a study says about one arm: a verdict, a figure to show large, and the sentence behind it.

    The figure is a dash where no difference is shown.
    """

    study: str
    arm: str
    verdict: str
    figure: str
    sentence: str


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time of about `seconds` reads well, and its length in seconds."""
    return next((unit for unit in _SECONDS_A_UNIT if seconds >= 2 * unit[1]), ("s", 1.0))


def number(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, thousands grouped."""
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    is_plain = 1e-4 <= abs(value) < 1e9
    text = f"{value:,.{decimals}f}" if is_plain else f"{value:.{digits - 1}e}"
    return text.replace("-", "−", 1) if value < 0 else text


def amount(value: float, axis: Axis) -> str:
    """Return a position on `axis` with its unit."""
    if axis in ("seconds", "cpu_seconds"):
        unit, length = time_unit(value)
        return f"{number(value / length)}\u00a0{unit}"
    return f"{number(value)} {AXIS_NAMES[axis]}"


def weight_text(weight: float) -> str:
    """Return a weight as it stands in a cell: 0 is a dash."""
    return "–" if weight == 0 else f"{weight:.3g}"


def quality_text(study: StudyRecord, value: float) -> str:
    """Return a quality with four significant digits and the study's unit."""
    return f"{number(value, 4)} {study.unit}".strip()


def interval_text(low: float | None, high: float | None, n: int, digits: int = 3) -> str:
    """Return the interval and n in words: `0.2 to 0.4, n = 5`, hard spaces; an open end is named."""
    if low is None or high is None:
        return f"no interval, n\u00a0=\u00a0{n}"
    start = "open" if low == -math.inf else number(low, digits)
    end = "open" if high == math.inf else number(high, digits)
    return f"{start} to {end}, n\u00a0=\u00a0{n}"


def estimate_text(found: Estimate | NotReached, digits: int = 3) -> str:
    """Return an estimate with its interval, or the reason why there is none."""
    if isinstance(found, NotReached):
        return found.reason
    return f"{number(found.value, digits)} ({interval_text(found.low, found.high, found.n, digits)})"


def ratio_text(found: SpeedUp) -> str:
    """Return the ratio, marked where it's a bound only."""
    mark = "≥ " if found.is_at_least else "≤ " if found.is_at_most else ""
    return f"{mark}{number(found.ratio)}×"


def ratio_interval_text(found: SpeedUp) -> str:
    """Return the interval of a speed-up; a lower end of 0 is open."""
    return interval_text(-math.inf if found.low == 0.0 else found.low, found.high, found.n)


def claims_of(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Claim, ...]:
    """Return what the study says of all arms but the baseline and its double, compositions of more methods first."""
    found = comparisons(study, axis=axis)
    num_methods = {arm.name: len(arm.methods) for arm in study.arms}
    return tuple(claim_of(study, one, axis) for one in sorted(found, key=lambda one: -num_methods[one.arm]))


def claim_of(study: StudyRecord, one: Comparison, axis: Axis) -> Claim:
    """Return what a study says of one arm that it compared."""
    found, base = one.found, study.baseline_arm
    if isinstance(found, NotReached):
        sentence = f"{one.arm} can't be compared with {base}: {found.reason} No speed-up is quoted."
        sentence += runs_text(study, one.arm)
        return Claim(study.name, one.arm, "not reached", "—", sentence)
    if isinstance(one.best, NotReached):
        own = f"its own best {study.quality_name} ({quality_text(study, found.quality)})"
        what = f"{one.best.reason} {one.arm} reached {own}"
    elif found is not one.best:
        lesser = f"the lesser of both bests ({quality_text(study, found.quality)})"
        what = f"{one.arm} doesn't surely reach {base}'s best {study.quality_name}. It reached {lesser}"
    else:
        what = f"{one.arm} reached {base}'s best {study.quality_name} ({quality_text(study, found.quality)})"
    figures = f"{ratio_text(found)}, 95 % interval {ratio_interval_text(found)}"
    share = f"{number(100 / found.ratio)} % of {base}'s {AXIS_NAMES[axis]}"
    figures += f", {p_text(one.p_value, one.num_tests)}" if one.p_value is not None else ""
    verdict, tail = _verdict(one, found)
    tail += runs_text(study, one.arm)
    bound = "at most " if found.is_at_least else "at least " if found.is_at_most else ""
    sentence = f"{what} in {bound}{share} ({figures}), over {opponent_text(study, one.arm)}.{tail}"
    figure = ratio_text(found) if verdict in ("faster", "slower") else "—"
    return Claim(study.name, one.arm, verdict, figure, sentence)


def runs_text(study: StudyRecord, arm: str) -> str:
    """Return which runs and seeds a comparison with the baseline isn't of; empty where it's of all."""
    texts = []
    for name in (arm, study.baseline_arm):
        diverged, total = num_diverged(study, name)
        has_failed = any(run.error for run in study.runs if run.arm == name)
        what = "diverged or failed" if has_failed else "diverged"
        texts += [f" {diverged} of {total} runs of {name} {what}."] if diverged else []
    missing, seeds = left_out(study, arm)
    if missing:
        texts.append(
            f" {missing} of {seeds} seeds are left out, which {arm} and {study.baseline_arm} didn't both finish."
        )
    return "".join(texts)


def p_text(p_value: float, num_compared: int) -> str:
    """Return a p-value with what it's adjusted for."""
    text = f"p {'< 0.001' if p_value < 0.001 else '= ' + number(p_value, 2)}"
    return f"{text} adjusted for {num_compared} comparisons" if num_compared > 1 else text


def opponent_text(study: StudyRecord, arm: str, opponent: str | None = None) -> str:
    """Return how strong the opponent of an arm is, by default the baseline: tuned, plain, or neither.

    Where the best settings of either were known before their search, that is said too.
    """
    arms = {one.name: one for one in study.arms}
    against, own = arms[opponent or study.baseline_arm], arms[arm]
    known = known_text({one.name: one.search.by_hand for one in (own, against) if one.search and one.search.is_known})
    return f"{_strength_text(against, own)}{f'; {known}' if known else ''}"


def _strength_text(against: ArmRecord, own: ArmRecord) -> str:
    if against.opponent == "plain":
        text = f"a plain opponent ({against.source})"
        return text if own.search else f"{text}, at settings with no search on record"
    if against.search is None or not against.search.is_choice:
        # A search of one setting chose nothing.
        return "an opponent with no search on record"
    what = "a tuned opponent"
    if against.opponent != "tuned" and len(against.search.dimensions) == 1:
        what = f"an opponent of which {against.search.dimensions[0].name} alone was searched"
    effort = effort_of(against.search)
    trials, steps = f"{effort.num_trials} trials", f"{effort.num_steps:,} steps"
    if own.search is None or not own.search.is_choice:
        settings = f"published settings ({own.source})" if own.opponent == "plain" else "the baseline's settings"
        return f"{what} ({trials}, {steps}), at {settings}"
    mine = effort_of(own.search)
    if not is_as_hard(against.search, own.search):
        return (
            f"an opponent that wasn't searched as the arm was ({trials} of {effort.num_settings} settings and {steps} "
            f"against the arm's {mine.num_trials} of {mine.num_settings} and {mine.num_steps:,})"
        )
    if effort.num_steps == mine.num_steps:
        return f"{what} ({trials}, {steps}, as many as the arm's)"
    # Runs that diverged, and other batch sizes, take other numbers of steps.
    return f"{what} ({trials} as the arm's, {steps} against {mine.num_steps:,})"


def prediction_rows(study: StudyRecord) -> tuple[tuple[str, str, str, str], ...]:
    """Return for each prediction who is compared, what was predicted, what came, and whether it was met."""
    num_tests = study.registration.family_size if study.registration else 0
    rows = []
    for one in outcomes_of(study):
        made, found = one.prediction, one.found
        who = f"{made.arm} over {made.opponent}, by {AXIS_NAMES.get(cast('Axis', made.axis), made.axis)}"
        if isinstance(found, NotReached):
            came = found.reason
        else:
            came = f"{ratio_text(found)} ({ratio_interval_text(found)})"
            came += f", {p_text(one.p_value, num_tests)}" if one.p_value is not None else ""
        rows.append((who, f"≥ {number(made.at_least)}×", came, one.verdict))
    return tuple(rows)


def _verdict(one: Comparison, found: SpeedUp) -> tuple[str, str]:
    if found.low is None or found.high is None:
        return "one seed", " One seed shows no spread, so this is no claim."
    if found.is_unstable:
        faster = one.arm if found.ratio > 1 else "the baseline"
        return "diverged", f" Too many runs of {faster} diverged where this is read off, so this is no claim."
    if found.low <= 1.0 <= found.high:
        return "no difference shown", " The interval includes 1, so no difference is shown."
    word = "faster" if found.ratio > 1 else "slower"
    if not one.is_shown:
        level = f"the screening's {one.level}" if one.is_screening else f"{one.level}"
        return f"perhaps {word}", f" p isn't below {level}, so this is a hint and no claim."
    return word, f" Found by screening, at {one.level}: run it again by itself." if one.is_screening else ""


def noise_sentences(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[str, ...]:
    """Return what noise does here: to the baseline against itself, to the best of many arms, and to the next study."""
    return tuple(text for text in (noise_sentence(study, axis=axis), _luck_sentence(study, axis)) if text)


def _luck_sentence(study: StudyRecord, axis: Axis) -> str:
    """Return what luck alone shows, and the seeds that it takes to see past it."""
    compared = comparisons(study, axis=axis)
    closed = [one.found for one in compared if isinstance(one.found, SpeedUp) and one.found.error]
    if not closed:
        return ""
    error = statistics.median(one.error or 0.0 for one in closed)
    seed_error = statistics.median(one.seed_error for one in closed)
    cost_error = statistics.median(one.cost_error for one in closed)
    strictest = min(compared, key=lambda one: one.level)
    n, level = closed[0].n, strictest.level
    text = ""
    if len(compared) > 1:
        best = best_of(len(compared), error)
        by = "" if axis == "seconds" else f" by {AXIS_NAMES[axis]}"
        text = f"Of {len(compared)} arms that do nothing the best would show about {number(best)}×{by} here. "
    needed = seeds_needed(_SMALL_GAIN, seed_error, cost_error, strictest.num_tests, level, _POWER)
    goal = f"To show a gain of {_SMALL_GAIN}× at p < {level}, adjusted, in {_POWER:.0%} of studies"
    if needed is None:
        return f"{text}{goal}, no number of seeds is enough: profile the costs in more turns."
    seeds = f"more than {_MANY_SEEDS}" if needed > _MANY_SEEDS else str(needed)
    return f"{text}{goal} takes {seeds} seeds with such runs; this study has {n}."


def noise_sentence(study: StudyRecord, *, axis: Axis = "seconds") -> str:
    """Return what the A/A arm shows, or that the study has none."""
    floor = noise_floor(study, axis=axis)
    if floor is None:
        what = f"no arm {NOISE_ARM!r} that is its baseline with other seeds"
        return f"The study has {what}, so its noise floor isn't measured."
    text = (
        f"Noise floor: {study.baseline_arm} against itself with other seeds differs by up to "
        f"{number(floor.difference)} {study.quality_name}"
    )
    if isinstance(floor.speed_up, NotReached):
        return f"{text}. {floor.speed_up.reason}"
    interval = ratio_interval_text(floor.speed_up)
    by = "" if axis == "seconds" else f" by {AXIS_NAMES[axis]}"
    return f"{text} and shows a speed-up{by} of {ratio_text(floor.speed_up)} ({interval})."
