"""Searching arms: equal effort by construction, promotion, widening, and what's refused."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from cosmati.errors import DivergenceError, MissingExtraError, RunError
from cosmati.records.study import SearchRecord
from cosmati.study import points
from cosmati.study.points import PointSettings
from cosmati.study.search import (
    TRIALS_FILE,
    Dimension,
    SearchedArm,
    SearchPlan,
    chosen_settings,
    search_arms,
)
from tests.study.fake_runs import FULL_STEPS, FakeRun, loss_at, search_start

RATE = Dimension(name="lr", low=1e-3, high=1.0)
SMALL = SearchPlan(rungs=((0.25, 8), (0.5, 4), (1.0, 2)), extra_rungs=((0.25, 4), (1.0, 2)))


def searched(log: list[str], name: str, *, best: float = 0.1, **changes: Any) -> SearchedArm:
    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        log.append(f"{name} {chosen['lr']} {budget} {seed}")
        return FakeRun(budget, loss_at({"lr": float(chosen["lr"]) * 0.1 / best}, budget, seed))

    return SearchedArm(**{"start": start, "dimensions": [RATE], "recipe_text": name, **changes})


def search(
    arms: Mapping[str, SearchedArm], folder: Path, plan: SearchPlan = SMALL, **changes: Any
) -> dict[str, SearchRecord]:
    options = {"quality": "loss", "higher_is_better": False, "hardware": "machine", **changes}
    return search_arms(arms, plan, folder, console=Console(file=io.StringIO()), **options)


def test_the_best_go_on_and_all_runs_are_kept(tmp_path: Path) -> None:
    log: list[str] = []
    record = search({"a": searched(log, "a"), "b": searched(log, "b", known=[{"lr": 0.1}])}, tmp_path)
    for name, found in record.items():
        assert [(t.budget, t.seed) for t in found.trials] == [(0.25, 100)] * 8 + [(0.5, 100)] * 4 + [(1.0, 100)] * 2
        first = {t.point: t.quality for t in found.trials[:8]}
        ranked = sorted(first, key=first.__getitem__)
        assert [t.point for t in found.trials[8:12]] == ranked[:4]
        assert [t.point for t in found.trials[12:]] == ranked[:2]
        assert found.chosen == ranked[0]
        assert [t.steps for t in found.trials[::13]] == [FULL_STEPS / 4, FULL_STEPS]
        assert [t.is_known for t in found.trials[:8]] == [name == "b"] + [False] * 7
    assert chosen_settings(record["b"]) == {"lr": 0.1}
    # Points of one number are the same in both arms, but for those that are known.
    assert [t.settings for t in record["a"].trials[1:8]] == [t.settings for t in record["b"].trials[1:8]]
    assert [line.split()[0] for line in log[:4]] == ["a", "b", "a", "b"]
    assert len(set(log)) == len(log) == 28


def test_a_higher_metric_can_be_the_better_one(tmp_path: Path) -> None:
    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        return FakeRun(budget, -loss_at(chosen, budget, seed))

    lower = search({"a": searched([], "a")}, tmp_path / "lower")["a"]
    higher = search({"a": searched([], "a", start=start)}, tmp_path / "higher", higher_is_better=True)["a"]
    assert [(t.point, -t.quality) for t in higher.trials] == [(t.point, t.quality) for t in lower.trials]
    assert higher.chosen == lower.chosen


def test_an_optimum_at_an_edge_widens_the_shared_range_for_all(tmp_path: Path) -> None:
    plan = SearchPlan(rungs=((0.25, 8), (1.0, 2)), extra_rungs=((0.25, 4), (1.0, 1)), max_rounds=2)
    own = Dimension(name="size", choices=(1, 2, 3))
    arms = {
        "far": searched([], "far", best=30.0, known=[{"lr": 0.9}]),
        "near": searched([], "near", dimensions=[own, RATE]),
    }
    record = search(arms, tmp_path, plan)
    far, near = record["far"], record["near"]
    for found in (far, near):
        (rate,) = [one for one in found.dimensions if one.name == "lr"]
        assert (rate.low, rate.high, rate.widened) == (1e-3, pytest.approx(1000.0), 1)
        assert Counter(t.budget for t in found.trials) == {0.25: 12, 1.0: 3}
        assert all(1.0 < float(t.settings["lr"]) <= 1000 for t in found.trials if t.point >= 8 and found is far)
    assert 1.0 < float(chosen_settings(far)["lr"]) < 700
    assert 0.01 < float(chosen_settings(near)["lr"]) < 1.0
    # The chosen point itself is moved into what was added.
    moved = next(t for t in near.trials if t.point == 8)
    assert moved.settings == {"size": chosen_settings(near)["size"], "lr": pytest.approx(10**1.5)}


def test_an_own_range_widens_for_its_arm_and_all_get_a_round(tmp_path: Path) -> None:
    log: list[str] = []
    arms = {
        "far": searched(log, "far", best=30.0, known=[{"lr": 0.9}]),
        "other": searched(
            log, "other", start=lambda s, b, d: FakeRun(b, 1.0), dimensions=[Dimension(name="x", low=1.0, high=2.0)]
        ),
    }
    record = search(arms, tmp_path, SearchPlan(rungs=((1.0, 8),), extra_rungs=((1.0, 4),), max_rounds=1))
    assert [len(found.trials) for found in record.values()] == [12, 12]
    assert [found.dimensions[0].widened for found in record.values()] == [1, 0]
    assert len({t.settings["x"] for t in record["other"].trials}) == 12


def test_an_optimum_that_stays_at_an_edge_is_left_there_after_the_last_round(tmp_path: Path) -> None:
    size = Dimension(name="size", choices=(1, 2, 3), wider=((), (4, 5, 6)))
    arm = searched([], "a", start=lambda s, b, d: FakeRun(b, -float(s["size"])), dimensions=[size])
    record = search({"a": arm}, tmp_path, SearchPlan(rungs=((1.0, 8),), extra_rungs=((1.0, 4),)))
    (found,) = record["a"].dimensions
    assert (found.choices, found.widened, found.ends_above) == (("1", "2", "3", "4", "5"), 2, False)
    assert [t.settings["size"] for t in record["a"].trials[8:]] == [4] * 4 + [5] * 4
    assert chosen_settings(record["a"]) == {"size": 5}
    stopped = Dimension(name="lr", low=1e-3, high=1.0, widest=(1e-3, 1.0))
    record = search({"a": searched([], "a", best=1e20, dimensions=[stopped], known=[{"lr": 1.0}])}, tmp_path)
    assert (record["a"].dimensions[0].widened, len(record["a"].trials)) == (0, 14)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_arm_has_the_same_number_of_runs_at_each_budget(data: st.DataObject) -> None:
    def ladder(name: str) -> tuple[tuple[float, int], ...]:
        counts = sorted(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label=name), reverse=True)
        return tuple(zip((0.25, 0.5, 1.0)[3 - len(counts) :], counts, strict=True))

    plan = SearchPlan(
        rungs=ladder("rungs"),
        extra_rungs=ladder("extra"),
        max_rounds=data.draw(st.integers(0, 3)),
        seeds=tuple(range(100, 100 + data.draw(st.integers(1, 2)))),
    )
    fails = data.draw(st.floats(0, 0.5), label="share that diverges")

    def start(best: float, chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        far = abs(math.log10(float(chosen["lr"]) / best))
        quality = math.inf if far > 6 * (1 - fails) else far + float(chosen.get("size", 0))
        return FakeRun(budget, quality)

    arms = {}
    for name in ("a", "b", "c"):
        own = (
            [Dimension(name=f"size of {name}", choices=(1, 2), wider=((0,), (3,)))] if data.draw(st.booleans()) else []
        )
        best = 10.0 ** data.draw(st.floats(-6, 3))
        known = [{"lr": 0.1} | {one.name: 1 for one in own}] if data.draw(st.booleans()) else []
        arms[name] = SearchedArm(start=partial(start, best), dimensions=[*own, RATE], recipe_text=name, known=known)
    with TemporaryDirectory() as folder:
        try:
            record = search(arms, Path(folder), plan)
        except RunError:  # all runs of an arm diverged
            assume(False)
    counts = [Counter((t.budget, t.seed) for t in found.trials) for found in record.values()]
    assert counts[0] == counts[1] == counts[2]
    rounds = (len(record["a"].trials) // len(plan.seeds) - sum(c for _, c in plan.rungs)) / sum(
        c for _, c in plan.extra_rungs
    )
    assert rounds in range(plan.max_rounds + 1)
    shared = [[d for d in found.dimensions if d.name == "lr"] for found in record.values()]
    assert shared[0] == shared[1] == shared[2]
    for found in record.values():
        full = {t.point: t.quality for t in found.trials if t.budget == 1.0 and t.seed == 100}
        if len(plan.seeds) == 1:
            assert full[found.chosen] == min(full.values())


def test_a_last_round_draws_near_the_best_and_finds_better(tmp_path: Path) -> None:
    other = Dimension(name="size", choices=(1, 2, 4, 8, 16))

    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        return FakeRun(budget, loss_at(chosen, budget, seed) + 0.01 * abs(int(chosen["size"]) - 4))

    def arms() -> dict[str, SearchedArm]:
        known = [{"lr": 0.07, "size": 8}]
        return {
            "a": searched([], "a", start=start, dimensions=[RATE, other]),
            "b": searched([], "b", start=start, dimensions=[RATE, other], known=known),
        }

    once = SearchPlan(rungs=((0.25, 4), (1.0, 2)), extra_rungs=((1.0, 1),), max_rounds=0)
    twice = replace(once, near_rungs=((0.25, 16), (1.0, 2)), near=0.1)
    before, after = search(arms(), tmp_path / "once", once), search(arms(), tmp_path / "twice", twice)
    for name in ("a", "b"):
        centre = chosen_settings(before[name])
        added = [t for t in after[name].trials if t.point >= 4]
        assert Counter(t.budget for t in added) == {0.25: 16, 1.0: 2}
        for trial in added:
            away = math.log(float(trial.settings["lr"]) / float(centre["lr"])) / math.log(1e3)
            assert abs(away) <= 0.1 + 1e-9
            sizes = [1, 2, 4, 8, 16]
            assert abs(sizes.index(int(trial.settings["size"])) - sizes.index(int(centre["size"]))) <= 1
        assert len({t.settings["size"] for t in added}) > 1
        best = {t.point: t.quality for t in after[name].trials if t.budget == 1.0}
        assert after[name].chosen == min(best, key=best.__getitem__)
        assert best[after[name].chosen] <= min(t.quality for t in before[name].trials if t.budget == 1.0)
    assert any(after[name].chosen >= 4 for name in after)


def test_a_point_counts_by_its_mean_over_seeds(tmp_path: Path) -> None:
    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        return FakeRun(budget, {("a", 1): 1.0, ("a", 2): 9.0, ("b", 1): 4.0, ("b", 2): 4.0}[str(chosen["x"]), seed])

    arm = SearchedArm(
        start=start,
        dimensions=[Dimension(name="x", choices=("a", "b"))],
        recipe_text="",
        known=[{"x": "a"}, {"x": "b"}],
    )
    record = search({"one": arm}, tmp_path, SearchPlan(rungs=((1.0, 2),), extra_rungs=((1.0, 1),), seeds=(1, 2)))
    assert chosen_settings(record["one"]) == {"x": "b"}


def test_a_run_that_diverged_counts_and_is_never_the_best(tmp_path: Path) -> None:
    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        error = DivergenceError("nan") if float(chosen["lr"]) > 0.01 else None
        return FakeRun(budget, 5.0, error=error)

    record = search({"a": searched([], "a", start=start)}, tmp_path, SearchPlan(rungs=((1.0, 8),), max_rounds=0))["a"]
    assert len(record.trials) == 8
    assert {t.quality for t in record.trials} == {5.0, math.inf}
    assert all((t.quality == math.inf) == (float(t.settings["lr"]) > 0.01) for t in record.trials)
    assert float(chosen_settings(record)["lr"]) <= 0.01


def test_a_search_that_only_diverges_says_so(tmp_path: Path) -> None:
    wrong = searched([], "a", start=lambda s, b, d: FakeRun(b, math.nan))
    with pytest.raises(RunError, match=r"'a' at budget 0.25 diverged \(8 of them\).*lower rates"):
        search({"b": searched([], "b"), "a": wrong}, tmp_path)
    with pytest.raises(RunError, match=r"'a' at budget 0.25 diverged"):
        search(
            {"a": searched([], "a", start=lambda s, b, d: FakeRun(b, -math.inf))},
            tmp_path / "up",
            higher_is_better=True,
        )


def test_a_further_round_that_only_diverges_leaves_the_choice(tmp_path: Path) -> None:
    def start(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        rate = float(chosen["lr"])
        return FakeRun(budget, 1 / rate if rate <= 1 else math.nan)

    record = search({"a": searched([], "a", start=start, known=[{"lr": 0.99}])}, tmp_path)["a"]
    assert len(record.trials) == 14 + 6
    assert chosen_settings(record) == {"lr": 0.99}


def test_a_killed_search_goes_on_and_a_changed_one_begins_again(tmp_path: Path) -> None:
    def arms(log: list[str], **changes: Any) -> dict[str, SearchedArm]:
        far = searched(log, "a", best=30.0, known=[{"lr": 0.9}])
        return {"a": far, "b": searched(log, "b", **changes)}

    log: list[str] = []
    whole = search(arms(log), tmp_path)
    path = tmp_path / TRIALS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(log) == len(set(log))
    for kept in (0, 5, 19, len(lines) - 1):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:50])
        again: list[str] = []
        assert search(arms(again), tmp_path) == whole
        assert again == log[kept:]
        assert path.read_bytes() == b"".join(lines)
    repeated: list[str] = []
    assert search(arms(repeated), tmp_path) == whole
    assert not repeated
    changes = {"recipe_text": "b2"}, {"dimensions": [Dimension(name="lr2", low=1.0, high=2.0)]}
    search(arms(repeated, **changes[0]), tmp_path)
    assert {line.split()[0] for line in repeated} == {"b"}
    assert len(repeated) == len(log) / 2
    search(arms(repeated), tmp_path, hardware="another")
    assert len(repeated) == 1.5 * len(log)


def test_more_points_keep_the_runs_that_are_the_same(tmp_path: Path) -> None:
    log: list[str] = []
    search({"a": searched(log, "a")}, tmp_path, SearchPlan(rungs=((1.0, 4),), max_rounds=0))
    search({"a": searched(log, "a")}, tmp_path, SearchPlan(rungs=((1.0, 6),), max_rounds=0))
    assert len(log) == len(set(log)) == 6


def test_ranges_that_do_not_match_are_refused_by_name(tmp_path: Path) -> None:
    other = Dimension(name="lr", low=1e-3, high=2.0)
    with pytest.raises(ValueError, match=r"'a' and 'b' search 'lr' over different ranges"):
        search({"a": searched([], "a"), "b": searched([], "b", dimensions=[other])}, tmp_path)
    for changes, words in (
        ({"dimensions": []}, r"'a' are \[\]"),
        ({"dimensions": [RATE, RATE]}, "each once"),
        ({"known": [{"lr": 0.1 + k / 100} for k in range(9)]}, "9 known settings and the plan 8 points"),
        ({"known": [{"lr": 0.1}, {"lr": 0.1}]}, "a known setting twice"),
        ({"known": [{"lr": 3.0}]}, "isn't from 0.001 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            search({"a": searched([], "a", **changes)}, tmp_path)
    assert not (tmp_path / TRIALS_FILE).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"rungs": ((0.5, 4), (0.25, 2))},
        {"rungs": ((0.5, 2), (1.0, 4))},
        {"rungs": ()},
        {"rungs": ((1.0, 0),)},
        {"rungs": ((0.0, 4), (1.0, 1))},
        {"extra_rungs": ((0.25, 4), (0.5, 1))},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"max_rounds": -1},
        {"near_rungs": ((0.25, 4), (0.5, 1))},
        {"near_rungs": ((0.25, 4),), "rungs": ((0.25, 4),), "extra_rungs": ((0.25, 4),), "near": 0.0},
        {"near": 1.5},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"let budgets grow|let all end at 1|give seeds|near is"):
        SearchPlan(**options)


def test_without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"cosmati\[study\]"):
        points.quasi_random(1, 1, 0)


def test_a_torn_line_inside_a_character_is_cut(tmp_path: Path) -> None:
    arm = {"a": searched([], "a", dimensions=[RATE, Dimension(name="ü", choices=("ä", "ö"))])}
    whole = search(arm, tmp_path)
    path = tmp_path / TRIALS_FILE
    text = path.read_text()
    path.write_bytes(text.encode() + json.dumps({"ä": 1}, ensure_ascii=False).encode()[:3])
    assert search(arm, tmp_path) == whole
    assert path.read_text() == text


@pytest.mark.usefixtures("quick_processes")
def test_two_at_a_time_give_the_same_record(tmp_path: Path) -> None:
    def arms(folder: Path) -> dict[str, SearchedArm]:
        folder.mkdir()
        return {
            name: SearchedArm(start=partial(search_start, str(folder), name, 0.0), dimensions=[RATE], recipe_text=name)
            for name in ("a", "b")
        }

    plan = SearchPlan(rungs=((0.5, 4), (1.0, 2)), max_rounds=0)
    alone = search(arms(tmp_path / "1"), tmp_path / "1", plan)
    assert search(arms(tmp_path / "2"), tmp_path / "2", plan, jobs=2) == alone
    starts = (tmp_path / "2" / "starts.txt").read_text().splitlines()
    assert len({line.split()[-1] for line in starts}) == 2
    assert len(starts) == 12
