"""Find the best composition of a pool of parts at equal training time, by successive halving, every run counted.

Each part is on or off. "Nothing", "all" and each part alone are the first compositions; the others are drawn. What a
step of each costs is profiled before, alone and in turns, and a composition gets as many steps as fit into the time
that "nothing" takes: at a budget b it's the recipe at b / c, where c is its cost over nothing's. So quality is compared
at equal time, by costs that were measured for the very composition, and not multiplied up from its parts.

What is found was chosen among many, on the seeds and rows that it was chosen on: show it in a study of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console

from cosmati.core.method import Method
from cosmati.errors import BatchError, PlanError
from cosmati.optim import Optimizer
from cosmati.records.study import CostProfile, Setting, settings_key
from cosmati.study.costs import profile_costs
from cosmati.study.definition import Arm, Study
from cosmati.study.found_composition import FoundComposition, composition_text
from cosmati.study.jobs import hardware_of_starts
from cosmati.study.lines import made_folder, only_one
from cosmati.study.measured import Run
from cosmati.study.points import Dimension, PointSettings, SearchSpace, chosen_settings, quasi_random
from cosmati.study.search import SearchedArm, SearchPlan, search_arms

DRAWS_PER_POINT = 16
"""Quasi-random draws for each composition that is wanted: where parts are few, most draws repeat one."""
PLAN = SearchPlan(max_rounds=0)


class Composable(Protocol):
    """What a pool changes: a `Recipe`."""

    @property
    def methods(self) -> tuple[Method, ...]:
        """Of the run."""
        ...

    @property
    def text(self) -> str:
        """All that says what the run does."""
        ...

    def trainer(self) -> Run:
        """Make the run."""
        ...


PoolPart = Method | Optimizer | Callable[[Any], Any]
"""A method that is added, an optimizer that takes the place of the recipe's, or a function from recipe to recipe."""


@dataclass(frozen=True, kw_only=True)
class SearchedPart:
    """A part whose settings are searched together with whether it's on.

    Args:
        make: makes it of settings by name: `MixUp` itself, or a function.
        dimensions: of the settings. Where several parts are put together by hand, ranges are taken at their middle.
    """

    make: Callable[..., PoolPart]
    dimensions: Sequence[Dimension]


@dataclass(frozen=True, kw_only=True)
class PartPool:
    """The parts that compositions are made of, and how hard the best one is searched.

    Args:
        name: of the pool.
        recipe: makes the recipe without any of the parts, at a share of the full budget and for a seed. It's called
            with any share above 0, and its schedule is dilated with it. Let it measure on rows that are reported
            nowhere.
        parts: by name, without a dot. Of several optimizers one composition has one.
        quality: name of the metric that counts.
        higher_is_better: whether a higher metric is the better one.
        plan: rungs and seeds. The first rung has a point for nothing, all, and each part alone at least. Ranges aren't
            widened, so `max_rounds` is 0.
        cost_turns: how many times each composition's cost is profiled.
        cost_budget: share of the full budget of a profiled run.

    Raises:
        PlanError: no parts, names that can't be told apart, or a plan that doesn't fit.
    """

    name: str
    recipe: Callable[[float, int], Composable]
    parts: Mapping[str, PoolPart | SearchedPart]
    quality: str
    higher_is_better: bool
    plan: SearchPlan = PLAN
    cost_turns: int = 3
    cost_budget: float = 0.05

    def __post_init__(self) -> None:
        """Refuse what can't be searched."""
        if not self.parts or any("." in name or not name for name in self.parts):
            msg = f"The parts are {list(self.parts)}: give some, by names without a dot."
            raise PlanError(msg)
        needed, count = len(_first(self)), self.plan.rungs[0][1]
        if self.plan.max_rounds or count < needed:
            msg = (
                f"The plan has {count} points and {self.plan.max_rounds} further rounds. Give its first rung {needed} "
                "at least, for nothing, all and each part alone, and max_rounds=0: a composition widens no range."
            )
            raise PlanError(msg)
        if self.cost_turns < 1 or not 0 < self.cost_budget <= 1:
            msg = f"cost_turns={self.cost_turns}, cost_budget={self.cost_budget}: give a turn or more, a share up to 1."
            raise PlanError(msg)

    def dimensions(self) -> tuple[Dimension, ...]:
        """Return what is searched: each part on or off, and its settings as `part.setting`."""
        found = [Dimension(name=name, choices=(False, True)) for name in self.parts]
        for name, part in self.parts.items():
            if isinstance(part, SearchedPart):
                found += [dataclasses.replace(one, name=f"{name}.{one.name}") for one in part.dimensions]
        return tuple(found)


def search_composition(
    pool: PartPool, folder: str | Path, *, hardware: str | None = None, jobs: int = 1, console: Console | None = None
) -> FoundComposition:
    """Profile what compositions cost, search them by successive halving, and return the best one with all runs.

    A search that was stopped goes on: finished turns and runs are lines of files in the folder.

    Args:
        pool: what to compose, and how hard.
        folder: where finished runs are kept.
        hardware: what it runs on, in words; None takes the device that its trainers train on.
        jobs: how many runs at a time; more than one are processes of their own. Costs are profiled one at a time.
        console: where progress goes; None means standard error.

    Raises:
        PlanError, BatchError: the recipe can't be trained without any part.
        RunError: every run of a budget diverged, another process is in the folder, or a run failed.
        MissingExtraError: SciPy isn't installed.
    """
    folder = made_folder(folder)
    points, refused = _trainable(pool, _points(pool))
    plain = partial(_composed_run, pool, points[0], pool.cost_budget, pool.plan.seeds[0])
    hardware = hardware or hardware_of_starts({pool.name: plain}, jobs)
    with only_one(folder):
        profiles = _profiled(pool, points, folder, hardware=hardware, one_thread=jobs > 1, console=console)
        costs = _relative_costs(points, profiles)
        arm = SearchedArm(
            start=partial(_start, pool, costs),
            dimensions=pool.dimensions(),
            recipe_text=json.dumps([*_texts(pool, points), costs]),
            known=points,
        )
        record = search_arms(
            {pool.name: arm},
            dataclasses.replace(pool.plan, rungs=tuple((b, min(n, len(points))) for b, n in pool.plan.rungs)),
            folder / "search",
            quality=pool.quality,
            higher_is_better=pool.higher_is_better,
            hardware=hardware,
            jobs=jobs,
            console=console,
        )[pool.name]
    first = [settings_key(one) for one in _first(pool)]
    trials = tuple(dataclasses.replace(one, is_known=settings_key(one.settings) in first) for one in record.trials)
    record = dataclasses.replace(record, trials=trials)
    chosen = chosen_settings(record)
    return FoundComposition(
        pool=pool.name,
        quality=pool.quality,
        higher_is_better=pool.higher_is_better,
        chosen=chosen,
        relative_cost=costs[settings_key(chosen)],
        search=record,
        profiles=profiles,
        refused=tuple(refused),
    )


def composed(pool: PartPool, settings: PointSettings, budget: float, seed: int) -> Composable:
    """Return a pool's recipe with the parts that settings turn on, in the pool's order.

    Args:
        pool: the parts.
        settings: a part's name with whether it's on, and `part.setting` with a value, as a search gives them.
        budget: share of the full budget, in the pool's steps whatever they cost.
        seed: of the run.

    Raises:
        PlanError: two optimizers are on.
    """
    recipe: Any = pool.recipe(budget, seed)
    optimizer = ""
    for name, part in pool.parts.items():
        if not settings[name]:
            continue
        made = part
        if isinstance(part, SearchedPart):
            made = part.make(**{one.name: settings[f"{name}.{one.name}"] for one in part.dimensions})
        if isinstance(made, Optimizer) and optimizer:
            msg = f"{optimizer!r} and {name!r} are optimizers, each in place of the recipe's own. Turn one off."
            raise PlanError(msg)
        optimizer = name if isinstance(made, Optimizer) else optimizer
        recipe = _with_part(recipe, cast("PoolPart", made))
    return cast("Composable", recipe)


def _with_part(recipe: Any, part: PoolPart) -> Any:  # noqa: ANN401  (a Recipe, which this room doesn't know)
    if isinstance(part, Method):
        return dataclasses.replace(recipe, methods=(*recipe.methods, part))
    if isinstance(part, Optimizer):
        return dataclasses.replace(recipe, optimizers=(part,))
    return part(recipe)


def _first(pool: PartPool) -> list[PointSettings]:
    """Return nothing, all, and each part alone, each once."""
    names = list(pool.parts)
    sets = [set[str](), set(names), *({name} for name in names)]
    found = {settings_key(one): one for one in (_settings(pool, {name: name in on for name in names}) for on in sets)}
    return list(found.values())


def _points(pool: PartPool) -> list[PointSettings]:
    """Return the first compositions, and drawn ones that differ from them and each other, up to the first rung's."""
    count, dimensions = pool.plan.rungs[0][1], pool.dimensions()
    found = {settings_key(one): one for one in _first(pool)}
    rows = quasi_random(len(dimensions), DRAWS_PER_POINT * count, pool.plan.points_seed)
    for drawn in SearchSpace(dimensions).points(rows, None):
        one = _settings(pool, drawn)
        if len(found) < count:
            found.setdefault(settings_key(one), one)
    return list(found.values())


def _settings(pool: PartPool, given: PointSettings) -> dict[str, Setting]:
    """Fill in the middle of each range, for what isn't given and for parts that are off: these are one composition."""
    return {
        one.name: given[one.name] if one.name in given and given[one.name.partition(".")[0]] else one.value(0.5)
        for one in pool.dimensions()
        if "." in one.name
    } | {name: given[name] for name in pool.parts}


def _trainable(pool: PartPool, points: Sequence[PointSettings]) -> tuple[list[PointSettings], list[tuple[str, str]]]:
    """Leave out compositions that can't be trained, with the reason; without any part the recipe must be."""
    found, refused = [], []
    for index, one in enumerate(points):
        try:
            composed(pool, one, pool.cost_budget, pool.plan.seeds[0]).trainer()
        except (PlanError, BatchError) as error:
            if index == 0:
                raise
            refused.append((composition_text(one), str(error)))
        else:
            found.append(one)
    return found, refused


def _texts(pool: PartPool, points: Sequence[PointSettings]) -> list[str]:
    return [composed(pool, one, 1.0, 0).text for one in points]


def _profiled(
    pool: PartPool,
    points: Sequence[PointSettings],
    folder: Path,
    *,
    hardware: str,
    one_thread: bool,
    console: Console | None,
) -> tuple[CostProfile, ...]:
    """Profile a step of each composition, in turns."""
    texts = _texts(pool, points)
    arms = {
        settings_key(one): Arm(start=partial(_composed_run, pool, one), recipe_text=text)
        for one, text in zip(points, texts, strict=True)
    }
    study = Study(
        name=pool.name,
        task="",
        arms=arms,
        budgets=(pool.cost_budget,),
        seeds=pool.plan.seeds[:1],
        quality=pool.quality,
        higher_is_better=pool.higher_is_better,
        baseline=settings_key(points[0]),
        cost_turns=pool.cost_turns,
    )
    return profile_costs(study, folder, hardware=hardware, one_thread=one_thread, console=console)


def _relative_costs(points: Sequence[PointSettings], profiles: Sequence[CostProfile]) -> dict[str, float]:
    """Return the cost of a step over nothing's, the geometric mean over turns, by composition."""
    logs: dict[str, list[float]] = {settings_key(one): [] for one in points}
    for one in profiles:
        logs[one.arm].append(math.log(one.seconds / one.steps))
    means = {key: sum(values) / len(values) for key, values in logs.items()}
    return {key: math.exp(mean - means[settings_key(points[0])]) for key, mean in means.items()}


def _composed_run(pool: PartPool, settings: PointSettings, budget: float, seed: int) -> Run:
    return composed(pool, settings, budget, seed).trainer()


def _start(pool: PartPool, costs: Mapping[str, float], settings: PointSettings, budget: float, seed: int) -> Run:
    """Make a run that takes as long as nothing's at this budget."""
    return _composed_run(pool, settings, budget / costs[settings_key(settings)], seed)
