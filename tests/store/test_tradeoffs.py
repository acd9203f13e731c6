"""Tradeoffs in SQL against sums over the runs, and the frontier against its definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex
from cosmati.store.summary import RunSummary, points_up
from cosmati.store.tradeoffs import COST_AXES, CostAxis, _frontier, quality_names, tradeoff_points
from tests.store.samples import indexed, run_record, small_study, write_run, write_study


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> RunIndex:
    root = tmp_path_factory.mktemp("store")
    write_study(root / "a", small_study("a", seeds=range(4)))
    write_study(root / "b", small_study("b", seeds=[3], hardware="GPU", price_per_hour=4.0))
    diverged = small_study("c")
    runs = tuple(replace(run, final=replace(run.final, quality=float("nan"))) for run in diverged.runs[:2])
    write_study(root / "c", replace(diverged, runs=runs + diverged.runs[2:]))
    write_study(root / "loss", small_study("loss", quality_name="loss", higher_is_better=False))
    for n in range(3):
        write_run(root / f"r{n}", run_record(f"r{n}", metrics={"accuracy": 0.4 + n / 10}))
    return indexed(root)


@pytest.mark.parametrize("axis", COST_AXES)
@pytest.mark.parametrize("exact", [{}, {"study": ("a",)}, {"arm": ("fast",)}, {"quality_name": ("loss",)}])
@pytest.mark.parametrize("price", [None, 3.0])
def test_points_are_means_over_seeds(
    index: RunIndex, axis: CostAxis, exact: dict[str, tuple[str, ...]], price: float | None
) -> None:
    chosen = RunFilter(exact=exact)
    wanted = exact.get("quality_name", ("accuracy",))[0]
    groups: dict[tuple[str, str, float | None], list[tuple[float, RunSummary]]] = {}
    for run in index.runs(chosen, limit=1000):
        x = getattr(run, axis)
        if axis == "cost" and price is not None:
            x = None if run.seconds is None else run.seconds / 3600 * price
        if run.quality_name == wanted and run.quality is not None and x:
            groups.setdefault((run.path, run.arm, run.budget), []).append((x, run))
    found = tradeoff_points(index, chosen, axis, price_per_hour=price)
    assert {(one.path, one.arm, one.budget) for one in found} == set(groups)
    assert [one.position for one in found] == sorted(one.position for one in found)
    for one in found:
        group = groups[one.path, one.arm, one.budget]
        qualities = [run.quality for _, run in group if run.quality is not None]
        assert one.n == len(group)
        assert one.position == pytest.approx(geometric_mean([x for x, _ in group]), rel=1e-12)
        assert one.quality == pytest.approx(fmean(qualities), rel=1e-12)
        assert one.error == (None if len(group) == 1 else pytest.approx(stdev(qualities) / len(group) ** 0.5, rel=1e-6))
        assert one.key in {run.key for _, run in group}
        assert (one.study, one.hardware, one.is_baseline) == (
            group[0][1].study,
            group[0][1].hardware,
            group[0][1].is_baseline,
        )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-3, 3)), max_size=12))
def test_the_frontier_is_what_nothing_dominates(points: list[tuple[int, int]]) -> None:
    points.sort()
    expected = {
        place
        for place, (x, y) in enumerate(points)
        if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
    }
    assert _frontier([(float(x), float(y)) for x, y in points]) == expected


def test_the_frontier_turns_with_the_measure(index: RunIndex) -> None:
    up = [one for one in tradeoff_points(index, RunFilter(), "seconds") if one.is_on_frontier]
    down = tradeoff_points(index, RunFilter(exact={"quality_name": ("loss",)}), "seconds")
    assert up == sorted(up, key=lambda one: one.quality)
    best = min(down, key=lambda one: (one.quality, one.position))
    assert best.is_on_frontier
    assert not max(down, key=lambda one: (one.quality, one.position)).is_on_frontier


def test_where_nobody_says_which_way_it_points_nothing_is_on_the_frontier(tmp_path: Path) -> None:
    for n in range(3):
        write_run(tmp_path / f"r{n}", run_record(metrics={"mystery": n / 10}))
    found = tradeoff_points(indexed(tmp_path), RunFilter(), "seconds")
    assert [one.is_on_frontier for one in found] == [False] * 3


def test_studies_that_say_different_things_of_a_measure_have_no_frontier(tmp_path: Path) -> None:
    """Of `score` more is better in two studies, and less in one: no majority makes the third one's worst its best."""
    for name, is_up in (("a", True), ("b", True), ("c", False)):
        write_study(tmp_path / name, small_study(name, quality_name="score", higher_is_better=is_up))
    index = indexed(tmp_path)
    found = tradeoff_points(index, RunFilter(), "seconds")
    assert {(one.higher_is_better, one.is_on_frontier) for one in found} == {(None, False)}
    alone = tradeoff_points(index, RunFilter(exact={"study": ("c",)}), "seconds")
    assert {one.higher_is_better for one in alone} == {False}


def test_one_seed_has_no_error_and_equal_ones_none_to_speak_of(tmp_path: Path) -> None:
    record = small_study(seeds=range(5))
    runs = tuple(replace(run, final=replace(run.final, quality=0.912345)) for run in record.runs)
    write_study(tmp_path / "s", replace(record, runs=runs))
    write_study(tmp_path / "one", small_study(seeds=[0]))
    found = tradeoff_points(indexed(tmp_path), RunFilter(), "seconds")
    assert {one.error for one in found if one.path == "s"} == {0.0}
    assert {one.error for one in found if one.path == "one"} == {None}


def test_measures_are_counted_whatever_is_chosen(index: RunIndex) -> None:
    expected = [("accuracy", 16 + 4 + 8 + 3), ("loss", 8)]
    assert quality_names(index, RunFilter()) == expected
    assert quality_names(index, RunFilter(exact={"quality_name": ("loss",)})) == expected


@pytest.mark.parametrize(
    ("name", "up"),
    [
        ("accuracy", True),
        ("val/acc", True),
        ("F1", True),
        ("bits_per_byte", False),
        ("eval_loss", False),
        ("word error rate", False),
        ("power", None),
        ("answers", None),
        ("loss of accuracy", None),
        ("", None),
    ],
)
def test_names_that_say_which_way_they_point(name: str, up: bool | None) -> None:
    assert points_up(name) is up
