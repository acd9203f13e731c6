"""The three sentences that a report opens with: what was trained, what was gained, what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cosmati.explorer.loss_figure import own_metrics
from cosmati.explorer.price import Price
from cosmati.explorer.run_view import RunView
from cosmati.explorer.wording import AXIS_NAMES, amount, number, ratio_interval_text, ratio_text
from cosmati.records.run import training_seconds
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import Comparison, SpeedUp, comparisons

_MAX_NAMED = 2


def opening_sentences(
    studies: Sequence[StudyRecord], run: RunView | None, price: Price | None = None
) -> tuple[str, ...]:
    """Return the three sentences, drawn from the records alone; none where there's neither a study nor a run.

    A figure of a gain stands in them only where a difference is shown.
    """
    if not studies and run is None:
        return ()
    return _trained(studies, run), _gained(studies, run), _cost(studies, run, price)


def _trained(studies: Sequence[StudyRecord], run: RunView | None) -> str:
    counts = [f"{_counted(len(study.runs), 'run')} of {_counted(len(study.arms), 'arm')}" for study in studies]
    if len(studies) == 1 and run is None:
        return f"Trained: {counts[0]} ({studies[0].task})."
    parts = [f"{count} in {study.name}" for count, study in zip(counts, studies, strict=True)]
    if run is not None:
        under = "under a policy, with a ledger" if run.is_governed and run.ledger else "by itself"
        recipe, steps = run.record.recipe_name, _counted(run.num_steps, "step")
        parts.append(f"one run of {recipe} {under} ({steps}, {run.status})")
    return f"Trained: {_joined(parts)}."


def _gained(studies: Sequence[StudyRecord], run: RunView | None) -> str:
    if not studies:
        last = {name: points[-1][1] for name, points in own_metrics(run).items() if points} if run else {}
        figures = ", ".join(f"{name} {number(value, 4)}" for name, value in last.items() if value is not None)
        reached = f"; it came to {figures}" if figures else ""
        return f"Gained: one run is compared with nothing, so no gain is shown{reached}."
    return f"Gained: {'; '.join(_gain_of(study) for study in studies)}."


def _gain_of(study: StudyRecord) -> str:
    where = f"in {study.name}"
    if not study.runs:
        return f"{where} no run has finished"
    found = comparisons(study)
    if not found:
        return f"{where} nothing is compared"
    shown = [(one, one.found) for one in found if one.is_shown and isinstance(one.found, SpeedUp)]
    faster = sorted((one for one in shown if one[1].ratio > 1), key=lambda one: -one[1].ratio)
    hints = [one.found.ratio for one in found if isinstance(one.found, SpeedUp) and _is_hint(one, one.found)]
    num_slower, num_silent = len(shown) - len(faster), len(found) - len(shown) - len(hints)
    texts = [_gain_text(study, one, speed_up) for one, speed_up in faster[:_MAX_NAMED]]
    if len(faster) > _MAX_NAMED:
        texts.append(f"{_are(len(faster) - _MAX_NAMED, 'further arm')} shown to be faster")
    if num_slower:
        texts.append(f"{_are(num_slower, 'arm')} shown to be slower")
    for word, num in (("faster", sum(one > 1 for one in hints)), ("slower", sum(one < 1 for one in hints))):
        if num:
            texts.append(f"{_are(num, 'arm')} perhaps {word} (a hint and no claim)")
    if num_silent:
        texts.append(f"for {_counted(num_silent, 'arm')} no difference is shown")
    return f"{where}, {_joined(texts)}" if faster else f"{where} nothing is shown to be gained: {_joined(texts)}"


def _is_hint(one: Comparison, found: SpeedUp) -> bool:
    """Say whether the interval by itself excludes 1, which the adjusted p doesn't let anybody claim."""
    if one.is_shown or found.low is None or found.high is None or found.is_unstable:
        return False
    return not found.low <= 1.0 <= found.high


def _gain_text(study: StudyRecord, one: Comparison, found: SpeedUp) -> str:
    """Say what share of the baseline's time an arm needs, as a bound where it's one."""
    bound = "at most " if found.is_at_least else "at least " if found.is_at_most else ""
    share = f"{bound}{number(100 / found.ratio)} % of {study.baseline_arm}'s {AXIS_NAMES['seconds']}"
    figures = f"{ratio_text(found)}, 95 % interval {ratio_interval_text(found)}"
    figures += ", by a screening" if one.is_screening else ""
    return f"{one.arm} needs {share} to the same {study.quality_name} ({figures})"


def _cost(studies: Sequence[StudyRecord], run: RunView | None, price: Price | None) -> str:
    """Return what was paid: the whole first, then its parts, and what the policy took."""
    parts: list[tuple[float, str]] = []
    for study in studies:
        trained = math.fsum(one.final.seconds for one in study.runs if math.isfinite(one.final.seconds))
        paid = ""
        if study.price_per_hour is not None:
            paid = f" ({number(trained / 3600 * study.price_per_hour)} $ at {study.price_per_hour:g} $ an hour)"
        parts.append((trained, f"for {study.name}{paid}"))
        trials = [trial for arm in study.arms if arm.search for trial in arm.search.trials]
        if trials:
            searched = math.fsum(trial.seconds for trial in trials if math.isfinite(trial.seconds))
            parts.append((searched, f"for {_counted(len(trials), 'trial')} of its search"))
    if run is not None:
        parts.append((training_seconds(run.record.seconds_by_part), "for the run by itself"))
    if price is not None:
        parts.append((price.seconds, "for the runs that it's priced by"))
    hardware = dict.fromkeys([*(study.hardware for study in studies), *([run.record.hardware] if run else [])])
    whole = amount(math.fsum(seconds for seconds, _ in parts), "seconds")
    told = [f"{amount(seconds, 'seconds')} {what}" for seconds, what in parts]
    alone = parts[0][1].partition("(")[2] if len(parts) == 1 else ""
    detail = f" ({_joined(told)})" if len(parts) > 1 else f" ({alone}" if alone else ""
    text = f"Cost: {whole} of training on {_joined(list(hardware))}, without evaluation{detail}"
    return f"{text}; {_of_policy(price)}." if price else f"{text}."


def _of_policy(price: Price) -> str:
    """Return what the policy costs, with figures only where a difference is shown."""
    row, seeds = price.rows[0], _counted(len(price.seeds), "seed")
    if row.verdict not in ("worse", "better", "differs"):
        return f"that the policy costs {row.name} isn't shown, with {seeds}"
    word = {"worse": "costs", "better": "costs nothing, and betters", "differs": "changes"}[row.verdict]
    over = row.difference.replace("(", "(95 % interval ", 1)
    return f"the policy {word} {row.name}, {row.governed} with it against {row.ungoverned} without: {over}"


def _counted(num: int, what: str) -> str:
    return f"{num:,} {what if num == 1 else what + 's'}"


def _are(num: int, what: str) -> str:
    return f"{_counted(num, what)} {'is' if num == 1 else 'are'}"


def _joined(parts: Sequence[str]) -> str:
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
