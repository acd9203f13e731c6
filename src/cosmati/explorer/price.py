"""What a policy costs: the governed run's figures beside those of the same training without the policy, by seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import RunError
from cosmati.explorer.class_marks import ALL_ROWS
from cosmati.explorer.run_view import RECORD_FILE, RunView, read_run
from cosmati.explorer.wording import amount, interval_text, number
from cosmati.records.run import RunRecord, training_seconds
from cosmati.study.statistics import LEVEL, Estimate, student_quantile

_OF_TIME = {"worse": "slower", "better": "faster"}
ONE_SEED = "one seed shows no spread"


@dataclass(frozen=True)
class PriceRow:
    """One figure with and without the policy.

    Attributes:
        name: of the metric, or of a cost.
        class_name: whose rows it's of; empty where it's of all.
        ungoverned: mean over the seeds, without the policy.
        governed: mean over the seeds, with it.
        difference: governed less ungoverned, with its interval and n; of a time the ratio.
        verdict: `better`, `worse`, `faster`, `slower`, `differs`, `no difference shown` or `one seed`.
    """

    name: str
    class_name: str
    ungoverned: str
    governed: str
    difference: str
    verdict: str


@dataclass(frozen=True)
class Price:
    """What a policy costs.

    Attributes:
        rows: the quality first.
        seeds: of the pairs.
        num_steps: of each run.
        sentence: what it comes to.
        notes: what else a reader must know.
        seconds: of training all runs beside the one that is shown.
        twin: the run without the policy that has the shown run's seed, None where there's none.
    """

    rows: tuple[PriceRow, ...]
    seeds: tuple[int, ...]
    num_steps: int
    sentence: str
    notes: tuple[str, ...]
    seconds: float = 0.0
    twin: RunView | None = None


def runs_below(folders: Sequence[str | Path]) -> tuple[RunView, ...]:
    """Read run folders, and folders of run folders; ledgers aren't read.

    Raises:
        RunError: one holds no run, or a record can't be read.
    """
    found = []
    for folder in map(Path, folders):
        inner = sorted(path.parent for path in folder.glob(f"*/{RECORD_FILE}"))
        is_run = (folder / RECORD_FILE).exists() or not inner
        found += [read_run(one, has_ledger=False) for one in ([folder] if is_run else inner)]
    return tuple(found)


def price_of(run: RunView, others: Sequence[RunView]) -> Price:
    """Compare a governed run, and others under its policy, with runs of the same training without one, by seed.

    Args:
        run: the governed run.
        others: runs without a policy, and runs under the same policy with other seeds.

    Raises:
        RunError: they can't be compared: other steps, other data, another policy, a seed twice, or no pair.
    """
    if not run.is_governed:
        raise RunError("The run had no policy, so there is no price to show. Leave --against out.")
    for one in others:
        _refuse_unlike(run.record, one)
    governed = _by_seed([run, *(one for one in others if one.is_governed)])
    plain = _by_seed([one for one in others if not one.is_governed])
    seeds = tuple(sorted(set(governed) & set(plain)))
    if not seeds:
        msg = (
            f"No run without a policy has a seed of the governed ones ({', '.join(map(str, sorted(governed)))}). "
            "Train the same recipe with policy=None and the same seed, and give that run's folder."
        )
        raise RunError(msg)
    pairs = [(governed[seed].record, plain[seed].record) for seed in seeds]
    rows = _rows(run, pairs)
    notes = [
        "Both were given as many steps and rows of the same data.",
        "Rows of rejected classes aren't trained on, and others take their places.",
        "Times are the runs' own, one after another, without evaluation.",
    ]
    if left := sorted(set(governed) ^ set(plain)):
        notes.append(f"Seeds {', '.join(map(str, left))} have no partner and are left out.")
    seconds = math.fsum(training_seconds(one.record.seconds_by_part) for one in others)
    twin, sentence = plain.get(run.record.seed), _sentence(run, rows[0], seeds)
    return Price(rows, seeds, run.record.num_steps, sentence, tuple(notes), seconds, twin)


def _refuse_unlike(record: RunRecord, other: RunView) -> None:
    """Refuse a run that isn't the same training with or without the policy."""
    own, theirs = record, other.record
    name = f"The run {theirs.run_id} (seed {theirs.seed})"
    if theirs.outcome != "completed" or own.outcome != "completed":
        unfinished = name if theirs.outcome != "completed" else "The governed run"
        raise RunError(f"{unfinished} hasn't completed, so it has no last metrics to compare. Let it end first.")
    if theirs.num_steps != own.num_steps:
        msg = f"{name} took {theirs.num_steps:,} steps, and the governed run {own.num_steps:,}."
        raise RunError(f"{msg} Compare runs of equal length.")
    if theirs.digests.get("data") != own.digests.get("data"):
        raise RunError(f"{name} trained on other data than the governed run. Compare runs on the same data.")
    if other.is_governed and theirs.digests["policy"] != own.digests["policy"]:
        raise RunError(f"{name} had another policy. Give runs under this run's policy, and runs without one.")


def _by_seed(runs: Sequence[RunView]) -> dict[int, RunView]:
    found: dict[int, RunView] = {}
    for one in runs:
        if one.record.seed in found:
            kind = "with" if one.is_governed else "without"
            msg = f"Two runs {kind} the policy have the seed {one.record.seed}: which one counts? Give one for a seed."
            raise RunError(msg)
        found[one.record.seed] = one
    return found


def _rows(run: RunView, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> tuple[PriceRow, ...]:
    shared = [name for name in run.record.metrics if all(name in one.metrics for pair in pairs for one in pair)]
    quality = run.about.quality if run.about else ""
    classes = run.governance.classes if run.governance else ()
    ordered = sorted(shared, key=lambda name: name != quality)
    if not ordered:
        raise RunError("The runs have no metric in common, so there is no quality to compare. Evaluate both alike.")
    rows = []
    for name in ordered:
        base, _, rest = name.partition("/")
        class_name = rest if rest in classes else ""
        values = [(with_policy.metrics[name], without.metrics[name]) for with_policy, without in pairs]
        # Losses are better where they're lower; of other metrics the run itself says it, of its quality.
        lower = True if base == "loss" else not run.about.higher_is_better if run.about and name == quality else None
        shown = base if class_name or rest == ALL_ROWS else name
        rows.append(_metric_row(shown.replace("_", " "), class_name, values, lower_is_better=lower))
    return (*rows, _time_row(pairs))


def _metric_row(
    name: str, class_name: str, values: Sequence[tuple[float, float]], *, lower_is_better: bool | None
) -> PriceRow:
    found = paired([one - other for one, other in values])
    means = [math.fsum(column) / len(values) for column in zip(*values, strict=True)]
    sign = "+" if found.value > 0 else ""
    text = f"{sign}{number(found.value)} ({_interval(found)})"
    verdict = _verdict(found, 0.0, lower_is_better=lower_is_better)
    return PriceRow(name, class_name, number(means[1], 4), number(means[0], 4), text, verdict)


def _time_row(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> PriceRow:
    seconds = [[training_seconds(one.seconds_by_part) for one in pair] for pair in pairs]
    means = [math.fsum(column) / len(seconds) for column in zip(*seconds, strict=True)]
    texts = [amount(value, "seconds") for value in means]
    if not all(value > 0 for pair in seconds for value in pair):
        return PriceRow("training time", "", texts[1], texts[0], "no time on record", "")
    found = paired([math.log(one / other) for one, other in seconds])
    ends = [None if end is None else math.exp(end) for end in (found.low, found.high)]
    text = f"{number(math.exp(found.value))}× ({interval_text(ends[0], ends[1], found.n)})"
    verdict = _verdict(found, 0.0, lower_is_better=True)
    return PriceRow("training time", "", texts[1], texts[0], text, _OF_TIME.get(verdict, verdict))


def paired(differences: Sequence[float]) -> Estimate:
    """Return the mean of differences over seeds, with Student's 95 % interval where there are two or more."""
    n = len(differences)
    mean = math.fsum(differences) / n
    if n == 1 or not math.isfinite(mean):
        return Estimate(mean, None, None, n)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (n - 1) / n)
    half = student_quantile(LEVEL, n - 1) * error
    return Estimate(mean, mean - half, mean + half, n, error=error)


def _interval(found: Estimate) -> str:
    return interval_text(found.low, found.high, found.n)


def _verdict(found: Estimate, nothing: float, *, lower_is_better: bool | None) -> str:
    if found.low is None or found.high is None:
        return "one seed" if found.n == 1 else "not finite"
    if found.low <= nothing <= found.high:
        return "no difference shown"
    if lower_is_better is None:
        return "differs"
    return "better" if (found.value < nothing) == lower_is_better else "worse"


def _sentence(run: RunView, row: PriceRow, seeds: Sequence[int]) -> str:
    n = len(seeds)
    over = "one seed" if n == 1 else f"{n} seeds"
    head = (
        f"After {run.record.num_steps:,} steps the model came to {row.name} {row.governed} under the policy, and to "
        f"{row.ungoverned} without it (means of {over})"
        if n > 1
        else f"After {run.record.num_steps:,} steps the model came to {row.name} {row.governed} under the policy, and "
        f"to {row.ungoverned} without it"
    )
    shown = row.difference.replace("(", "(95 % interval ", 1)
    tails: Mapping[str, str] = {
        "worse": f"The policy costs quality: {shown}.",
        "better": f"The policy costs no quality here, it is better: {shown}.",
        "differs": f"The difference is {shown}.",
        "one seed": f"The difference is {row.difference}; {ONE_SEED}, so this is no measure of the price.",
    }
    return f"{head}. {tails.get(row.verdict, f'No difference is shown: {shown}.')}"
