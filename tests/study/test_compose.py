"""Searching compositions at equal time: against all of them computed one by one, and against SciPy's Welch."""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from cosmati.core.clock import Clock
from cosmati.errors import BatchError, PlanError, RunError
from cosmati.methods import CutOut, LabelSmoothing
from cosmati.optim import SGD, AdamW, Optimizer
from cosmati.study.compose import PartPool, SearchedPart, composed, search_composition
from cosmati.study.found_composition import (
    FoundComposition,
    composition_text,
    found_lines,
    mean_difference,
    part_worths,
    recipe_file,
)
from cosmati.study.points import Dimension
from cosmati.study.search import SearchPlan
from cosmati.train.observers import Observer
from cosmati.train.run.result import RunResult

FULL_STEPS = 8000
WORTH = {"good": 0.3, "dear": 0.2, "bad": -0.2, "idle": 0.0}
COST = {"good": 1.1, "dear": 3.0, "bad": 0.9, "idle": 1.0}
FITS: list[str] = []


@dataclass
class TimedRun:
    """A run whose quality grows with the logarithm of its steps, and with its parts."""

    name: str
    steps: int
    seconds: float
    quality: float
    observers: list[Observer] = field(default_factory=list)

    @property
    def clock(self) -> Clock:
        return Clock(step=self.steps, rows=8 * self.steps, seconds=self.seconds)

    def fit(self) -> RunResult:
        FITS.append(f"{self.name} {self.steps}")
        return RunResult("completed", self.clock, {"score": self.quality}, self.seconds, {}, None)


@dataclass(frozen=True)
class TimedRecipe:
    steps: int
    parts: tuple[str, ...] = ()
    methods: tuple[Any, ...] = ()
    optimizers: tuple[Optimizer, ...] = (SGD(lr=0.1),)

    @property
    def text(self) -> str:
        return f"{self.steps} {self.parts} {self.methods} {self.optimizers}"

    def trainer(self) -> TimedRun:
        if "wrong" in self.parts and "good" in self.parts:
            raise BatchError("wrong and good don't go together")
        quality = score(self.parts, self.steps)
        return TimedRun(str(self.parts), self.steps, 0.001 * self.steps * cost(self.parts), quality)


def cost(parts: tuple[str, ...]) -> float:
    return math.prod(COST.get(part, 1.0) for part in parts)


def score(parts: tuple[str, ...], steps: int) -> float:
    return math.log(steps / FULL_STEPS) / 4 + sum(WORTH.get(part, 0.0) for part in parts)


def plain(budget: float, seed: int) -> TimedRecipe:
    return TimedRecipe(round(FULL_STEPS * budget))


def with_part(name: str) -> Any:
    def add(recipe: TimedRecipe) -> TimedRecipe:
        return replace(recipe, parts=(*recipe.parts, name))

    return add


def pool_of(*names: str, **changes: Any) -> PartPool:
    options: dict[str, Any] = {
        "name": "pool",
        "recipe": plain,
        "parts": {name: with_part(name) for name in names},
        "quality": "score",
        "higher_is_better": True,
        "plan": SearchPlan(rungs=((0.25, 16), (1.0, 3)), max_rounds=0, seeds=(7,)),
        "cost_turns": 2,
    }
    return PartPool(**{**options, **changes})


def found_in(pool: PartPool, folder: Path) -> FoundComposition:
    return search_composition(pool, folder, hardware="machine", console=Console(file=io.StringIO()))


def test_the_chosen_one_is_the_best_of_all_at_equal_time(tmp_path: Path) -> None:
    FITS.clear()
    found = found_in(pool_of(*WORTH), tmp_path)
    every = [tuple(n for n, on in zip(WORTH, row, strict=True) if on) for row in itertools.product([0, 1], repeat=4)]
    at_equal_time = {parts: score(parts, round(FULL_STEPS / cost(parts))) for parts in every}
    best = max(at_equal_time.values())
    chosen = tuple(name for name, is_on in found.chosen.items() if is_on)
    assert at_equal_time[chosen] == best
    assert "good" in chosen
    assert "dear" not in chosen, "0.2 better, and worth less than the steps that it costs"
    # As many steps, dear parts would win.
    assert score(("good", "dear"), FULL_STEPS) > score(chosen, FULL_STEPS)
    assert found.relative_cost == pytest.approx(cost(chosen))
    assert Counter(t.budget for t in found.search.trials) == {0.25: 16, 1.0: 3}
    assert len({composition_text(t.settings) for t in found.search.trials}) == 16
    for trial in found.search.trials:
        assert trial.seconds == pytest.approx(0.001 * FULL_STEPS * trial.budget, rel=1e-3)
    # All that was fitted is counted.
    assert len(FITS) == len(found.search.trials) + found.num_profiled
    assert found.num_profiled == 16 * (2 + 1)
    assert [sum(t.is_known for t in found.search.trials if t.budget == b) for b in (0.25,)] == [6]


def test_a_search_that_is_finished_runs_nothing_again_and_a_changed_part_does(tmp_path: Path) -> None:
    first = found_in(pool_of("good", "dear"), tmp_path)
    FITS.clear()
    assert found_in(pool_of("good", "dear"), tmp_path) == first
    assert not FITS
    changed = pool_of("good", "dear")
    found_in(replace(changed, parts={**changed.parts, "dear": with_part("idle")}), tmp_path)
    assert len(FITS) == 4 + 3 + 4 * 3


def test_what_a_part_seems_worth_is_welchs_difference_over_all_points(tmp_path: Path) -> None:
    found = found_in(pool_of(*WORTH), tmp_path)
    smallest = [t for t in found.search.trials if t.budget == 0.25]
    for worth in part_worths(found):
        groups = [[t.quality for t in smallest if t.settings[worth.part] is on] for on in (True, False)]
        assert (worth.num_with, worth.num_without) == (8, 8)
        assert worth.difference is not None
        expected = stats.ttest_ind(*groups, equal_var=False)
        assert worth.difference.value == pytest.approx(sum(groups[0]) / 8 - sum(groups[1]) / 8)
        assert worth.difference.value / worth.difference.error == pytest.approx(expected.statistic)
        half = stats.t.ppf(0.975, math.floor(expected.df + 1e-9)) * worth.difference.error
        assert worth.difference.high - worth.difference.value == pytest.approx(half)
    text = found_lines(found)
    assert any(line.startswith("  good: +") and "8 with it, 8 without" in line for line in text)
    assert "exploratory, score with a part less that without it, higher is better:" in text


def test_a_difference_of_few_has_no_interval() -> None:
    assert mean_difference([], [1.0]) is None
    lone = mean_difference([2.0], [1.0, 1.5])
    assert lone is not None
    assert (lone.value, lone.low) == (0.75, None)
    equal = mean_difference([2.0, 2.0], [1.0, 1.0])
    assert equal is not None
    assert (equal.low, equal.high) == (1.0, 1.0)


def test_settings_of_a_part_are_searched_and_do_not_matter_where_it_is_off(tmp_path: Path) -> None:
    def make(size: float) -> Any:
        return with_part("good" if size > 2 else "bad")

    sized = SearchedPart(make=make, dimensions=[Dimension(name="size", low=1.0, high=4.0, is_log=False)])
    pool = pool_of(parts={"sized": sized, "idle": with_part("idle")})
    found = found_in(pool, tmp_path)
    assert found.chosen["sized"] is True
    assert float(found.chosen["sized.size"]) > 2
    off = {t.settings["sized.size"] for t in found.search.trials if not t.settings["sized"]}
    assert off == {2.5}
    on = {t.settings["sized.size"] for t in found.search.trials if t.settings["sized"]}
    assert len(on) > 5
    assert composition_text({"a": True, "b": False, "a.x": 0.12345, "b.y": 1}) == "a(x=0.123)"
    assert composition_text({"a": False}) == "nothing"


def test_what_can_not_be_trained_is_left_out_by_name(tmp_path: Path) -> None:
    parts = {"adam": AdamW(lr=0.1), "sgd": SGD(lr=0.2), "good": with_part("good"), "wrong": with_part("wrong")}
    found = found_in(pool_of(parts=parts), tmp_path)
    reasons = dict(found.refused)
    assert set(reasons) == {composition_text(dict.fromkeys(parts, True)), *reasons}
    assert "Turn one off" in reasons["adam + sgd + good + wrong"]
    assert "good + wrong" in reasons
    assert len(found.refused) + len({t.point for t in found.search.trials}) == 16
    assert not any(t.settings["adam"] and t.settings["sgd"] for t in found.search.trials)
    assert any(line.startswith("not trained: good + wrong: wrong and good don't") for line in found_lines(found))

    def broken(budget: float, seed: int) -> TimedRecipe:
        return replace(plain(budget, seed), parts=("good", "wrong"))

    with pytest.raises(BatchError, match="don't go together"):
        found_in(pool_of("idle", recipe=broken), tmp_path / "broken")


def test_methods_are_added_and_an_optimizer_takes_the_place_of_the_recipes() -> None:
    parts = {
        "smoothing": LabelSmoothing(),
        "cutout": SearchedPart(make=CutOut, dimensions=[Dimension(name="length", low=0.1, high=0.5)]),
        "adam": AdamW(lr=0.1),
    }
    pool = pool_of(parts=parts)
    settings = {"smoothing": True, "cutout": True, "adam": True, "cutout.length": 0.25}
    whole = composed(pool, settings, 1.0, 0)
    assert whole.methods == (LabelSmoothing(), CutOut(length=0.25))
    assert isinstance(whole, TimedRecipe)
    assert whole.optimizers == (AdamW(lr=0.1),)
    assert composed(pool, {**settings, **dict.fromkeys(parts, False)}, 0.5, 0) == plain(0.5, 0)


def test_a_search_whose_runs_all_diverge_is_said(tmp_path: Path) -> None:
    def diverging(budget: float, seed: int) -> Any:
        class Diverging(TimedRecipe):
            def trainer(self) -> TimedRun:
                return replace(super().trainer(), quality=math.nan)

        return Diverging(10)

    with pytest.raises(RunError, match="diverged"):
        found_in(pool_of("good", recipe=diverging), tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": {}}, "give some"),
        ({"parts": {"a.b": with_part("a")}}, "without a dot"),
        ({"plan": SearchPlan()}, "max_rounds=0"),
        ({"plan": SearchPlan(rungs=((1.0, 1),), max_rounds=0)}, "first rung 2 at least"),
        ({"cost_turns": 0}, "a turn or more"),
        ({"cost_budget": 0.0}, "a share up to 1"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pool_of("good", **changes)


def test_two_optimizers_are_refused_by_name() -> None:
    pool = pool_of(parts={"adam": AdamW(lr=0.1), "sgd": SGD(lr=0.2)})
    with pytest.raises(PlanError, match="'adam' and 'sgd' are optimizers"):
        composed(pool, {"adam": True, "sgd": True}, 1.0, 0)


def test_the_file_gives_the_recipe_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(pool_of("good", "dear"), tmp_path / "found")
    source = tmp_path / "parts.py"
    source.write_text(
        "from tests.study.test_compose import pool_of\n\n\ndef made():\n    return pool_of('good', 'dear')\n"
    )
    path = tmp_path / "found" / "chosen.py"
    path.write_text(recipe_file(found, path, source, "made"))
    monkeypatch.chdir(tmp_path.parent)
    names: dict[str, Any] = {"__file__": str(path)}
    exec(path.read_text(), names)
    assert names["__doc__"].startswith("Of the pool pool: good.")
    recipe = names["recipe"]()
    assert recipe.parts == ("good",)
    trial = next(t for t in found.search.trials if t.budget == 1.0 and t.point == found.search.chosen)
    assert recipe.steps == trial.steps == round(FULL_STEPS / 1.1)
