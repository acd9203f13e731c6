"""Studies of known truth, simulated: `python -m benchmarks.statistics` counts what is read off them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cosmati.records.study import (
    ArmRecord,
    CostProfile,
    EvaluationPoint,
    Prediction,
    Registration,
    StudyRecord,
    StudyRun,
)
from cosmati.study.composition import pair_arms
from cosmati.study.noise import NOISE_ARM

COVERED = (0.92, 0.98)
COVERED_BY_BOUNDS = (0.95, 1.0)
"""An end that is open can't be missed."""
FULL_SECONDS, NUM_STEPS, PROFILE_STEPS = 30.0, 1000, 40
BUDGETS = (0.25, 0.5, 1.0)
FOUR_BUDGETS = (0.25, 0.5, 0.75, 1.0)
TWO_BUDGETS = (0.5, 1.0)


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
        large_noise: the same of the largest.
        arm_noise: the same of the arms, at all budgets.
        time_noise: of the logarithm of a run's time.
        drift: of what is common to the times of one seed's runs at one budget, or of one turn's profiles.
        turns: of profiles of costs, each as noisy as a run's time; none where the runs' own times count.
        cost: of an arm's step over one of the baseline's. Its quality is that of a larger budget by as much again.
        num_arms: beside the baseline.
        is_registered: whether all arms were, as one family of headlines.
        num_parts: instead of such arms, parts that are so many times as fast alone, and all their pairs, which are as
            many times as fast as both. What is read is their interaction, whose true ratio is 1.
        is_double: whether the arm is the baseline's double, with seeds of its own.
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
    large_noise: float = 1.0
    arm_noise: float = 1.0
    time_noise: float = 0.02
    drift: float = 0.05
    turns: int = 0
    cost: float = 1.0
    num_arms: int = 1
    is_registered: bool = False
    num_parts: int = 0
    is_double: bool = False
    covered: tuple[float, float] = COVERED
    most_false: float | None = None

    @property
    def truth(self) -> float:
        """The true value of what is read."""
        return 1.0 if self.num_parts else self.speed_up

    @property
    def arms(self) -> dict[str, tuple[str, ...]]:
        """The arms beside the baseline, with their parts."""
        if self.is_double:
            return {NOISE_ARM: ()}
        parts = [f"part {k}" for k in range(self.num_parts)]
        both = {" + ".join(pair): pair for pair in pair_arms(parts)}
        return {part: (part,) for part in parts} | both or {f"arm {k}": () for k in range(self.num_arms)}


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
    Shape(name="small budgets are twice as noisy", small_noise=2.0),
    *(
        Shape(name=f"large budgets are {f:g} times as noisy, n = {n}", n=n, large_noise=f)
        for f in (2.0, 3.0)
        for n in (5, 8)
    ),
    Shape(name="arm is 4 times as noisy, n = 8", n=8, arm_noise=4.0),
    Shape(name="little noise in quality, much in time", noise=0.001, seed_noise=0.001, time_noise=0.1),
    Shape(name="slower arm", speed_up=1 / 1.4),
    Shape(name="near the end of the span, n = 8, 3.8 times", n=8, speed_up=3.8),
    Shape(name="at the end of the span, n = 8, 4 times", n=8, speed_up=4.0, covered=COVERED_BY_BOUNDS),
    Shape(name="beyond the smallest budget", speed_up=5.0, covered=COVERED_BY_BOUNDS),
    # Arms without a seed in common have more degrees of freedom than the one's that they're given.
    Shape(name="the baseline's double", speed_up=1.0, is_double=True, covered=(0.92, 0.996)),
    *(
        Shape(name=name, speed_up=1.0, n=8, num_arms=4, turns=turns, is_registered=True, most_false=0.01)
        for name, turns in (
            ("headlines: four arms that do nothing, n = 8", 0),
            ("headlines by 5 profiles: four arms, n = 8", 5),
        )
    ),
    *(
        Shape(name=name, speed_up=1.0, n=8, large_noise=large, arm_noise=arm, is_registered=True, most_false=0.01)
        for name, large, arm in (
            ("large budgets 3 times as noisy: an arm, n = 8", 3.0, 1.0),
            ("an arm that is 4 times as noisy, n = 8", 1.0, 4.0),
        )
    ),
    Shape(name="screening: 28 arms that do nothing", speed_up=1.0, num_arms=28, most_false=0.05),
    Shape(name="interactions: 15 pairs of 1.15 each", speed_up=1.15, num_parts=6, budgets=TWO_BUDGETS, most_false=0.05),
)


def simulate(shape: Shape, generator: np.random.Generator) -> StudyRecord:
    """Draw a study."""
    arms = {"baseline": (), **shape.arms}
    names = list(arms)
    seeds = generator.normal(0.0, shape.seed_noise, (1 + shape.is_double, shape.n))
    runs = []
    for seed in range(shape.n):
        for budget in shape.budgets:
            drift = generator.normal(0.0, shape.drift)
            noise = shape.noise * (shape.small_noise if budget == min(shape.budgets) else 1.0)
            noise *= shape.large_noise if budget == max(shape.budgets) else 1.0
            for name in names:
                gain = 1.0 if name == "baseline" else shape.speed_up ** max(1, len(arms[name])) * shape.cost
                own = int(name == NOISE_ARM)
                spread = noise * (1.0 if name == "baseline" else shape.arm_noise)
                quality = shape.curve(budget * gain) + seeds[own, seed] + generator.normal(0.0, spread)
                seconds = FULL_SECONDS * budget * math.exp(drift + generator.normal(0.0, shape.time_noise))
                final = EvaluationPoint(int(NUM_STEPS * budget), seconds, float(quality))
                shown = seed + own * shape.n
                runs.append(StudyRun(name, budget, shown, f"{name}-{budget}-{shown}", (final,), final, {}))
    tests = tuple(Prediction(name, "baseline", "seconds", 1.1) for name in shape.arms)
    return StudyRecord(
        name=shape.name,
        task="simulated",
        quality_name="bits",
        higher_is_better=False,
        unit="",
        baseline_arm="baseline",
        arms=tuple(ArmRecord(name, "", "", parts) for name, parts in arms.items()),
        runs=tuple(runs),
        costs=tuple(profiles(shape, names, generator)),
        checklist=(),
        hardware="none",
        price_per_hour=None,
        command="",
        notes="",
        registration=Registration("headlines", tests, "", "") if shape.is_registered else None,
    )


def profiles(shape: Shape, names: Sequence[str], generator: np.random.Generator) -> Iterator[CostProfile]:
    """Draw the profiles of all arms' costs, turn by turn."""
    for turn in range(shape.turns):
        drift = generator.normal(0.0, shape.drift)
        for name in names:
            cost = FULL_SECONDS / NUM_STEPS * (1.0 if name == "baseline" else shape.cost)
            seconds = PROFILE_STEPS * cost * math.exp(drift + generator.normal(0.0, shape.time_noise))
            yield CostProfile(name, turn, PROFILE_STEPS, seconds)
