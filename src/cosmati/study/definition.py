"""A study as it's asked for: its arms, budgets and seeds, and what it predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cosmati.errors import PlanError
from cosmati.records.study import ArmRecord, ChecklistItem, Prediction, Registration, SearchRecord, StudyRecord
from cosmati.study.measured import Run

StudyCell = tuple[str, float, int]
"""Arm, budget and seed of a run."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training.

    Args:
        start: makes the run for a budget and a seed.
        description: in words.
        recipe_text: all that says what the arm does; a finished run counts only for an equal text.
        methods: what it adds to the baseline.
        seed_offset: added to the study's seeds; an A/A arm is the baseline with other seeds.
        search: how its settings were found, as `search_arms` returns it; None where they are the baseline's.
        opponent: how strong it is as one: `tuned`, searched as the arms are, or `plain`, a common public recipe.
        source: where a plain opponent's settings come from.
    """

    start: Callable[[float, int], Run]
    description: str = ""
    recipe_text: str = ""
    methods: tuple[str, ...] = ()
    seed_offset: int = 0
    search: SearchRecord | None = None
    opponent: Literal["tuned", "plain"] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse an opponent that isn't what it's called."""
        if self.opponent == "tuned" and self.search is None:
            msg = "A tuned opponent needs its `search`, as search_arms returns it."
            raise PlanError(msg)
        if self.opponent == "tuned" and self.search and not self.search.is_choice:
            msg = "All trials of this opponent's search have one setting, so it isn't tuned. Search more of them."
            raise PlanError(msg)
        if self.opponent == "plain" and not self.source:
            msg = "A plain opponent needs its `source`: where its settings are published."
            raise PlanError(msg)

    def record(self, name: str) -> ArmRecord:
        """Return what a study's record keeps of it."""
        return ArmRecord(
            name, self.description, self.recipe_text, self.methods, self.opponent, self.source, self.search
        )


@dataclass(frozen=True, kw_only=True)
class RegistrationPlan:
    """What a study predicts before its first run.

    Args:
        family: name of the family of tests.
        predictions: this study's tests of it.
        num_tests: tests of the family in all of its studies together, for which p-values are adjusted; None where
            they're this study's predictions.
    """

    family: str
    predictions: tuple[Prediction, ...]
    num_tests: int | None = None

    def __post_init__(self) -> None:
        """Refuse a family without a test, and one that is smaller than its part."""
        if not self.predictions:
            msg = f"The family {self.family!r} predicts nothing. Give it predictions, or the study no registration."
            raise PlanError(msg)
        if self.num_tests is not None and self.num_tests < len(self.predictions):
            msg = (
                f"The family {self.family!r} has {self.num_tests} tests, and this study alone predicts "
                f"{len(self.predictions)}. Count all of its studies' predictions."
            )
            raise PlanError(msg)

    @property
    def family_size(self) -> int:
        """Tests that p-values are adjusted for."""
        return self.num_tests or len(self.predictions)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it's asked for.

    Args:
        name: of the study.
        task: what is learnt from what, in words.
        arms: by name; the baseline among them.
        budgets: shares of the full budget.
        seeds: the same for all arms, but for an arm's offset.
        quality: name of the metric of the evaluation that counts.
        higher_is_better: whether a higher metric is the better one.
        baseline: name of the arm that the others are compared with.
        quality_name: of the metric in words; the metric's name if empty.
        unit: of the metric.
        checklist: what makes the baseline a strong one.
        notes: whatever a reader must know besides.
        registration: what is predicted before the first run; None predicts nothing.
        cost_turns: how many times each arm's cost is profiled, alone, in turns with the others; 0 takes the seconds of
            the runs themselves.
        cost_budget: share of the full budget of a profiled run; None means the smallest one.
    """

    name: str
    task: str
    arms: Mapping[str, Arm]
    budgets: Sequence[float]
    seeds: Sequence[int]
    quality: str
    higher_is_better: bool
    baseline: str = "baseline"
    quality_name: str = ""
    unit: str = ""
    checklist: tuple[ChecklistItem, ...] = ()
    notes: str = ""
    registration: RegistrationPlan | None = None
    cost_turns: int = 0
    cost_budget: float | None = None

    def __post_init__(self) -> None:
        """Refuse what would be found out after the runs. NumPy's numbers, which aren't JSON's, become Python's."""
        seeds, budgets = [float(seed) for seed in self.seeds], [float(budget) for budget in self.budgets]
        is_whole = all(seed.is_integer() for seed in seeds)
        is_share = all(0 < budget < math.inf for budget in budgets)
        wrong = {
            f"baseline {self.baseline!r} is no arm ({', '.join(self.arms)})": self.baseline not in self.arms,
            f"seeds {seeds}: give integers, each once": not (seeds and is_whole and len(set(seeds)) == len(seeds)),
            f"budgets {budgets}: give finite shares above 0, each once": (
                not (budgets and is_share and len(set(budgets)) == len(budgets))
            ),
            f"cost_turns {self.cost_turns}: give 2 or more, or 0": self.cost_turns < 0 or self.cost_turns == 1,
        }
        found = [text for text, is_wrong in wrong.items() if is_wrong]
        if found:
            msg = f"The study {self.name!r} can't be run: {'; '.join(found)}."
            raise PlanError(msg)
        object.__setattr__(self, "seeds", tuple(int(seed) for seed in seeds))
        object.__setattr__(self, "budgets", tuple(budgets))

    def cells(self) -> Iterator[StudyCell]:
        """Give arm, budget and seed of each run; arms take turns, each time from another one on, so drift hits all."""
        names = list(self.arms)
        for turn, seed in enumerate(self.seeds):
            for place, budget in enumerate(self.budgets):
                first = (turn + place) % len(names)
                for name in names[first:] + names[:first]:
                    yield name, budget, seed + self.arms[name].seed_offset

    def record(
        self,
        *,
        hardware: str,
        price_per_hour: float | None = None,
        command: str = "",
        registration: Registration | None = None,
    ) -> StudyRecord:
        """Return its record without a run.

        Args:
            hardware: that it runs on, in words.
            price_per_hour: of that, None where it isn't known.
            command: that makes the study.
            registration: what was written down before its first run.
        """
        return StudyRecord(
            name=self.name,
            task=self.task,
            quality_name=self.quality_name or self.quality,
            higher_is_better=self.higher_is_better,
            unit=self.unit,
            baseline_arm=self.baseline,
            arms=tuple(arm.record(name) for name, arm in self.arms.items()),
            runs=(),
            checklist=self.checklist,
            hardware=hardware,
            price_per_hour=price_per_hour,
            command=command,
            notes=self.notes,
            registration=registration,
        )
