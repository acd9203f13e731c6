"""What the intervals of a study cover, and how often it claims what isn't so: `python -m benchmarks.statistics`.

Studies are simulated whose truth is known, read like any other, and counted. A figure that leaves its range ends the
command with 1. Two errors are told apart: of noise, which an interval has to cover (it holds what the same study would
read without any), and of joining a few budgets by a curve, the bias, which is that reading against the truth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import RESULTS
from cosmati.progress import ProgressDisplay
from cosmati.records.study import ArmRecord, CostProfile, EvaluationPoint, StudyRecord, StudyRun
from cosmati.study.comparison import NotReached, SpeedUp, comparisons, speed_up_at_equal_quality

NUM_STUDIES = 1000
COVERED = (0.92, 0.98)
COVERED_BY_BOUNDS = (0.95, 1.0)
"""An end that is open can't be missed."""
LEAST_TRUE = 0.92
"""Share of intervals that hold the true ratio, bias and all."""
MOST_BIAS = 0.01
"""Of the noiseless reading, as a share of the true ratio."""
FULL_SECONDS, NUM_STEPS, PROFILE_STEPS = 30.0, 1000, 40
BUDGETS = (0.25, 0.5, 1.0)
FOUR_BUDGETS = (0.25, 0.5, 0.75, 1.0)


def straight(budget: float) -> float:
    """Bits that fall by as much with each doubling."""
    return 2.6 - 0.2 * math.log(budget)


def bent(budget: float) -> float:
    """Bits that fall by a power law to a floor, as language models' do."""
    return 2.0 + 0.6 * math.pow(budget, -0.35)


def steep(budget: float) -> float:
    """Bits that fall by a larger power."""
    return 2.0 + 0.6 * math.pow(budget, -0.7)


def sigmoid(budget: float) -> float:
    """Errors that fall slowly at first and slowly at last."""
    return 0.1 + 0.9 / (1 + (budget / 0.3) ** 2)


def exponential(budget: float) -> float:
    """Errors that are nearly gone at half of the largest budget."""
    return math.exp(-4 * budget)


BENDS = {
    "straight over the logarithm": (straight, 0.001),
    "power of -0.35 to a floor": (bent, 0.003),
    "power of -0.7 to a floor": (steep, MOST_BIAS),
    "sigmoid": (sigmoid, 0.025),
    "exponential": (exponential, 0.07),
}
"""Curves, with the most bias of a reading off three budgets."""
BIAS_SPEED_UPS = (1.2, 1.4, 1.6, 2.5, 3.5)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kind of study.

    Attributes:
        name: of it.
        speed_up: true one of the arms, by time.
        n: seeds.
        budgets: shares of the largest one.
        curve: true quality of the baseline, lower is better; an arm's at a budget is the baseline's at a larger one.
        noise: standard deviation of a run's quality.
        seed_noise: of what a seed brings to all runs.
        small_noise: how many times noisier the smallest budget is.
        time_noise: of the logarithm of a run's time.
        drift: of what is common to the times of one seed's runs at one budget, or of one turn's profiles.
        turns: of profiles of costs, each as noisy as a run's time; none where the runs' own times count.
        cost: of an arm's step over one of the baseline's. Its quality is that of a larger budget by as much again.
        num_arms: beside the baseline.
        covered: range for the share of intervals that hold the truth.
        most_false: range's end for the share of studies with a false claim; None where there's something to claim.
    """

    name: str
    speed_up: float = 1.4
    n: int = 5
    budgets: Sequence[float] = BUDGETS
    curve: Callable[[float], float] = bent
    noise: float = 0.01
    seed_noise: float = 0.01
    small_noise: float = 1.0
    time_noise: float = 0.02
    drift: float = 0.05
    turns: int = 0
    cost: float = 1.0
    num_arms: int = 1
    covered: tuple[float, float] = COVERED
    most_false: float | None = None


def at_most(level: float, num_studies: int) -> float:
    """Return what a share of `level` stays below in 999 of 1,000 simulations."""
    return level + 3.1 * math.sqrt(level * (1 - level) / num_studies)


SHAPES = (
    *(Shape(name=f"bent curve, n = {n}", n=n) for n in (3, 5, 8)),
    *(Shape(name=f"bent curve, n = 8, {ratio} times", n=8, speed_up=ratio) for ratio in (1.2, 1.6, 2.5)),
    Shape(name="straight curve", curve=straight),
    Shape(name="steep curve, n = 8", n=8, curve=steep),
    Shape(name="sigmoid curve, n = 8, 1.6 times", n=8, curve=sigmoid, speed_up=1.6),
    *(Shape(name=f"profiled costs, {turns} turns", n=8, turns=turns, cost=1.2) for turns in (5, 8)),
    Shape(name="profiled costs, 5 turns, little noise in quality", noise=0.001, seed_noise=0.001, turns=5),
    Shape(name="profiled costs, 3 turns, little noise in quality", noise=0.001, seed_noise=0.001, turns=3),
    Shape(name="four budgets", budgets=FOUR_BUDGETS),
    Shape(name="seeds matter more than runs", seed_noise=0.05),
    Shape(name="seeds don't matter", seed_noise=0.0),
    # Pooled, the errors of the large budgets, by which this ratio goes, are taken for larger than they are.
    Shape(name="small budgets are twice as noisy", small_noise=2.0, covered=(0.92, 0.99)),
    Shape(name="little noise in quality, much in time", noise=0.001, seed_noise=0.001, time_noise=0.1),
    Shape(name="slower arm", speed_up=1 / 1.4),
    Shape(name="beyond the smallest budget", speed_up=5.0, covered=COVERED_BY_BOUNDS),
    Shape(name="headlines: four arms that do nothing, n = 8", speed_up=1.0, n=8, num_arms=4, most_false=0.01),
    Shape(name="headlines by 5 profiles: four arms, n = 8", speed_up=1.0, n=8, num_arms=4, turns=5, most_false=0.01),
    Shape(name="screening: 28 arms that do nothing", speed_up=1.0, num_arms=28, most_false=0.05),
)


def simulate(shape: Shape, generator: np.random.Generator) -> StudyRecord:
    """Draw a study."""
    names = ["baseline", *(f"arm {k}" for k in range(shape.num_arms))]
    seeds = generator.normal(0.0, shape.seed_noise, shape.n)
    runs = []
    for seed in range(shape.n):
        for budget in shape.budgets:
            drift = generator.normal(0.0, shape.drift)
            noise = shape.noise * (shape.small_noise if budget == min(shape.budgets) else 1.0)
            for name in names:
                true = shape.curve(budget * (1.0 if name == "baseline" else shape.speed_up * shape.cost))
                quality = true + seeds[seed] + generator.normal(0.0, noise)
                seconds = FULL_SECONDS * budget * math.exp(drift + generator.normal(0.0, shape.time_noise))
                final = EvaluationPoint(int(NUM_STEPS * budget), seconds, float(quality))
                runs.append(StudyRun(name, budget, seed, f"{name}-{budget}-{seed}", (final,), final, {}))
    return StudyRecord(
        name=shape.name,
        task="simulated",
        quality_name="bits",
        higher_is_better=False,
        unit="",
        baseline_arm="baseline",
        arms=tuple(ArmRecord(name, "", "") for name in names),
        runs=tuple(runs),
        costs=tuple(profiles(shape, names, generator)),
        checklist=(),
        hardware="none",
        price_per_hour=None,
        command="",
        notes="",
    )


def profiles(shape: Shape, names: Sequence[str], generator: np.random.Generator) -> Iterator[CostProfile]:
    """Draw the profiles of all arms' costs, turn by turn."""
    for turn in range(shape.turns):
        drift = generator.normal(0.0, shape.drift)
        for name in names:
            cost = FULL_SECONDS / NUM_STEPS * (1.0 if name == "baseline" else shape.cost)
            seconds = PROFILE_STEPS * cost * math.exp(drift + generator.normal(0.0, shape.time_noise))
            yield CostProfile(name, turn, PROFILE_STEPS, seconds)


@dataclass(frozen=True)
class Found:
    """What came of a shape's studies.

    Attributes:
        shape: its name.
        n: seeds.
        num_quoted: speed-ups, or slow-downs at an arm's own best, that were quoted.
        covered: share of their intervals that hold the reading without noise, or the true ratio where that's a bound.
        true_covered: share that hold the true ratio.
        width: median of high over low, of those that are closed.
        bias: of the reading without noise, as a share of the true ratio; None where that is a bound.
        false_claims: share of studies with any; None where there's something to claim.
        best_of_arms: median over studies of the largest ratio that was quoted.
        misses: what left its range.
    """

    shape: str
    n: int
    num_quoted: int
    covered: float
    true_covered: float
    width: float
    bias: float | None
    false_claims: float | None
    best_of_arms: float
    misses: tuple[str, ...]


def look(shape: Shape, num_studies: int, tell: Callable[[float], None]) -> Found:
    """Simulate the studies of a shape, and count."""
    hits, true_hits, widths, best, num_false, num_quoted = 0, 0, [], [], 0, 0
    bias = _bias(shape)
    truth = shape.speed_up * (1 + (bias or 0.0))
    for number in range(num_studies):
        generator = np.random.Generator(np.random.Philox(key=[number, 12]))
        family = comparisons(simulate(shape, generator))
        read = [one.found for one in family if isinstance(one.found, SpeedUp)]
        num_quoted += len(read)
        for one in read:
            low, high = one.low or 0.0, math.inf if one.high is None else one.high
            hits += low <= truth <= high
            true_hits += low <= shape.speed_up <= high
            widths += [high / low] if low > 0 and math.isfinite(high) else []
        best += [max(one.ratio for one in read)] if read else []
        num_false += any(member.is_shown for member in family)
        tell((number + 1) / num_studies)
    false_claims = None if shape.most_false is None else num_false / num_studies
    found = Found(
        shape.name,
        shape.n,
        num_quoted,
        hits / num_quoted,
        true_hits / num_quoted,
        float(np.median(widths)) if widths else math.inf,
        bias,
        false_claims,
        float(np.median(best)),
        (),
    )
    return replace(found, misses=tuple(misses_of(found, shape, num_studies)))


def misses_of(found: Found, shape: Shape, num_studies: int) -> list[str]:
    """Return in words what left its range."""
    misses, covered, bias, false_claims = [], found.covered, found.bias, found.false_claims
    if not shape.covered[0] <= covered <= shape.covered[1] and shape.most_false is None:
        misses.append(f"covers {covered:.3f}, not {shape.covered[0]} to {shape.covered[1]}")
    if found.true_covered < LEAST_TRUE:
        misses.append(f"holds the truth in {found.true_covered:.3f}, under {LEAST_TRUE}")
    if bias is not None and abs(bias) > MOST_BIAS:
        misses.append(f"biased by {bias:+.3f}, over {MOST_BIAS}")
    if false_claims is not None and shape.most_false and false_claims > at_most(shape.most_false, num_studies):
        misses.append(f"false claims in {false_claims:.3f}, over {shape.most_false}")
    return misses


def _bias(shape: Shape) -> float | None:
    """Read a study without any noise."""
    quiet = replace(shape, noise=0.0, seed_noise=0.0, time_noise=0.0, drift=0.0, num_arms=1)
    record = simulate(quiet, np.random.Generator(np.random.Philox(0)))
    (one,) = comparisons(record)
    found = speed_up_at_equal_quality(record, one.arm) if isinstance(one.best, SpeedUp) else one.found
    if isinstance(found, NotReached) or found.is_at_least or found.is_at_most:
        return None
    return found.ratio / shape.speed_up - 1


def _bias_of_straight_lines(curve: Callable[[float], float], ratio: float) -> float:
    """Return what the reading's bias would be with straight lines between budgets, for comparison."""
    falling = [curve(budget * ratio) for budget in reversed(BUDGETS)]
    needs = np.interp(curve(max(BUDGETS)), falling, np.log(BUDGETS[::-1]))
    return math.exp(-float(needs)) / ratio - 1


def table_of(rows: Sequence[Found], num_studies: int) -> str:
    """Return the table as Markdown."""
    lines = [
        f"{num_studies:,} studies of each kind: three budgets, five seeds, 1.4 times as fast unless it says otherwise.",
        "",
        "| studies | quoted | hold the reading | hold the truth | high / low | bias | false claims | best arm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bias = "open" if row.bias is None else f"{100 * row.bias:+.1f} %"
        false = "" if row.false_claims is None else f"{100 * row.false_claims:.1f} %"
        width = "open" if math.isinf(row.width) else f"{row.width:.2f}"
        covered = f"{100 * row.covered:.1f} % | {100 * row.true_covered:.1f} %"
        lines.append(
            f"| {row.shape} | {row.num_quoted:,} | {covered} | {width} | {bias} | {false} | {row.best_of_arms:.2f} |"
        )
    return "\n".join(lines) + "\n"


def bias_table() -> tuple[str, list[str]]:
    """Return as Markdown what studies without noise read, against the truth, and what left its range."""
    heads = [f"{ratio} times" for ratio in BIAS_SPEED_UPS]
    lines = ["| curve | budgets | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    misses = []
    for name, (curve, most) in BENDS.items():
        for budgets in (BUDGETS, FOUR_BUDGETS):
            cells = []
            for ratio in BIAS_SPEED_UPS:
                bias = _bias(Shape(name=name, speed_up=ratio, curve=curve, budgets=budgets))
                assert bias is not None
                cells.append(f"{100 * bias:+.1f} %")
                if abs(bias) > most:
                    misses.append(f"{name}, {len(budgets)} budgets, {ratio} times: biased by {bias:+.3f}, over {most}")
            lines.append(f"| {name} | {len(budgets)} | {' | '.join(cells)} |")
        cells = [f"{100 * _bias_of_straight_lines(curve, ratio):+.1f} %" for ratio in BIAS_SPEED_UPS]
        lines.append(f"| {name} | {len(BUDGETS)}, joined by straight lines | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", misses


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS) -> int:
    """Simulate, write `statistics.json` and `.md`, print the table, and return 1 where a figure left its range."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.statistics", description=__doc__)
    parser.add_argument("--studies", type=int, default=NUM_STUDIES, help="of each kind (default: %(default)s)")
    parser.add_argument("--only", default="", help="kinds whose name has this in it; nothing is written")
    options = parser.parse_args(arguments)
    shapes = [shape for shape in SHAPES if options.only in shape.name]
    rows, ends = [], list(itertools.accumulate((shape.num_arms for shape in shapes), initial=0))
    with ProgressDisplay("simulated studies") as progress:
        for shape, done in zip(shapes, ends, strict=False):

            def tell(share: float, shape: Shape, done: int) -> None:
                progress.update((done + share * shape.num_arms) / ends[-1], shape.name)

            rows.append(look(shape, options.studies, partial(tell, shape=shape, done=done)))
    biases, misses = bias_table()
    table = f"{table_of(rows, options.studies)}\nWithout noise:\n\n{biases}"
    sys.stdout.write(table)
    if not options.only:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "statistics.md").write_text(f"# statistics\n\n`python -m benchmarks.statistics`\n\n{table}")
        content = {"studies": options.studies, "rows": [asdict(row) for row in rows]}
        (folder / "statistics.json").write_text(json.dumps(content, indent=1) + "\n")
    misses += [f"{row.shape}: {miss}" for row in rows for miss in row.misses]
    sys.stderr.write("".join(f"out of range: {miss}\n" for miss in misses))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
