"""Tradeoffs in SQL against sums over the runs, and the frontier against its definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex
from cosmati.store.summary import RunSummary, points_up
from cosmati.store.tradeoffs import COST_AXES, CostAxis, LeftOut, _frontier, left_out, quality_names, tradeoff_points
from tests.store.samples import indexed, run_record, small_study, write_run, write_study
from tests.study.oracles import log_quality, study


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


def with_qualities(root: Path, qualities: dict[int, float], **changes: object) -> RunIndex:
    """Write a study with these qualities by seed, of each of its arms and budgets."""
    record = small_study(seeds=qualities, **changes)
    runs = tuple(replace(run, final=replace(run.final, quality=qualities[run.seed])) for run in record.runs)
    write_study(root / "s", replace(record, runs=runs))
    return indexed(root)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6, 1e12])
def test_the_error_is_right_where_qualities_are_large_and_close(tmp_path: Path, size: float) -> None:
    qualities = {seed: size + 1e-3 * seed for seed in range(5)}
    expected = stdev(qualities.values()) / math.sqrt(5)  # in fractions, so exact
    found = tradeoff_points(with_qualities(tmp_path, qualities), RunFilter(), "seconds")
    assert [one.error for one in found] == pytest.approx([expected] * 4, rel=1e-9)


def test_a_quality_whose_square_is_beyond_all_numbers_has_no_error(tmp_path: Path) -> None:
    qualities = {seed: math.exp(400 + seed) for seed in range(3)}
    found = tradeoff_points(with_qualities(tmp_path, qualities), RunFilter(), "seconds")
    assert {one.error for one in found} == {None}
    assert [one.quality for one in found] == pytest.approx([fmean(qualities.values())] * 4, rel=1e-12)
    largest = tradeoff_points(with_qualities(tmp_path, {0: 1.7e308, 1: 1.6e308}), RunFilter(), "seconds")
    assert [one.quality for one in largest] == pytest.approx([1.65e308] * 4, rel=1e-12)


@pytest.mark.parametrize("axis", ["steps", "rows", "seconds"])
def test_equal_positions_and_qualities_stay_equal_whatever_the_number_of_seeds(tmp_path: Path, axis: CostAxis) -> None:
    """500 steps are 500 steps: the worse of two arms isn't on the frontier because its mean was rounded down."""
    for steps in (80, 100, 240, 625, 3000):
        arms = {f"n{n}": n for n in range(1, 12)}
        same = study({name: lambda b, s: 0.7 for name in ("baseline", *arms)}, seeds=range(11), budgets=(1.0,))
        runs = [run for run in same.runs if run.seed < arms.get(run.arm, 3)]
        finals = [replace(run.final, step=steps, rows=32 * steps, seconds=steps / 3, quality=0.7) for run in runs]
        runs = [replace(run, final=final) for run, final in zip(runs, finals, strict=True)]
        write_study(tmp_path / "s", replace(same, runs=tuple(runs)))
        found = tradeoff_points(indexed(tmp_path), RunFilter(), axis)
        assert {one.position for one in found} == {{"steps": steps, "rows": 32 * steps, "seconds": steps / 3}[axis]}
        assert {(one.quality, one.is_on_frontier) for one in found} == {(0.7, True)}


def test_a_position_is_a_geometric_mean(tmp_path: Path) -> None:
    record = small_study(seeds=range(3))
    seconds = {0: 1.0, 1: 10.0, 2: 1000.0}
    runs = tuple(replace(run, final=replace(run.final, seconds=seconds[run.seed])) for run in record.runs)
    write_study(tmp_path / "s", replace(record, runs=runs))
    found = tradeoff_points(indexed(tmp_path), RunFilter(), "seconds")
    assert [one.position for one in found] == pytest.approx([10 ** (4 / 3)] * 4, rel=1e-12)


@pytest.mark.parametrize("column", ["quality", "seconds", "steps", "cost"])
def test_a_limit_takes_whole_points_by_their_means(tmp_path: Path, column: str) -> None:
    """Those seeds of a point that pass a limit are the lucky ones: their mean is nobody's."""
    record = small_study(seeds=range(4))
    more = {0: 0.5, 1: 1.0, 2: 2.0, 3: 4.0}
    runs = [
        replace(
            run,
            final=replace(
                run.final,
                quality=run.final.quality * more[run.seed],
                seconds=run.final.seconds * more[run.seed],
                step=int(run.final.step * more[run.seed]),
            ),
        )
        for run in record.runs
    ]
    write_study(tmp_path / "s", replace(record, runs=tuple(runs)))
    index = indexed(tmp_path)
    every = tradeoff_points(index, RunFilter(), "seconds")
    mean: Callable[[list[float]], float] = fmean if column == "quality" else geometric_mean
    of_point = {
        one.key: mean([getattr(run, column) for run in index.runs() if (run.arm, run.budget) == (one.arm, one.budget)])
        for one in every
    }
    middle = sorted(of_point.values())[1] + 1e-6
    for chosen, passes in (
        (RunFilter(least={column: middle}), lambda value: value >= middle),
        (RunFilter(most={column: middle}), lambda value: value <= middle),
    ):
        expected = [one for one in every if passes(of_point[one.key])]
        found = tradeoff_points(index, chosen, "seconds")
        assert 0 < len(expected) < len(every)
        assert [replace(one, is_on_frontier=False) for one in found] == [
            replace(one, is_on_frontier=False) for one in expected
        ]


def test_who_mostly_diverges_is_on_no_frontier(tmp_path: Path) -> None:
    """12 of 15 runs of the best arm diverged: the three that didn't say nothing of it."""
    record = study({"baseline": log_quality(), "fragile": log_quality(0.5)}, seeds=range(5), budgets=(0.25, 0.5, 1.0))
    nan = math.nan
    runs = [
        replace(run, final=replace(run.final, quality=nan)) if run.arm == "fragile" and run.seed else run
        for run in record.runs
    ]
    failed = replace(runs[-1], error="RuntimeError: out of memory")
    write_study(tmp_path / "s", replace(record, runs=(*runs[:-1], failed)))
    index = indexed(tmp_path)
    for chosen in (RunFilter(), RunFilter(exact={"status": ("completed",)}), RunFilter(least={"seconds": 0.0})):
        found = tradeoff_points(index, chosen, "seconds")
        assert {one.arm for one in found if one.is_on_frontier} == {"baseline"}
        assert {(one.arm, one.n, one.num_lost) for one in found} == {("baseline", 5, 0), ("fragile", 1, 4)}
    (one,) = [one for one in found if (one.arm, one.budget) == ("fragile", 1.0)]
    assert one.losses == ((0.25, 4, 5), (0.5, 4, 5), (1.0, 4, 5))
    # One of eleven is less than a tenth, and counts for nothing.
    many = study({"baseline": log_quality(), "good": log_quality(0.5)}, seeds=range(11), budgets=(1.0,))
    runs = [
        replace(run, final=replace(run.final, quality=nan)) if (run.arm, run.seed) == ("good", 3) else run
        for run in many.runs
    ]
    write_study(tmp_path / "s", replace(many, runs=tuple(runs)))
    found = tradeoff_points(indexed(tmp_path), RunFilter(), "seconds")
    assert [(one.arm, one.num_lost) for one in found if one.is_on_frontier] == [("good", 1)]


def test_time_has_a_frontier_for_each_hardware(tmp_path: Path) -> None:
    """A slow machine's best is its frontier: that another one is faster says nothing of the methods."""
    record = small_study(seeds=[0])
    slow = tuple(replace(run, final=replace(run.final, seconds=10 * run.final.seconds)) for run in record.runs)
    write_study(tmp_path / "cpu", replace(record, runs=slow, hardware="CPU"))
    write_study(tmp_path / "gpu", replace(record, hardware="GPU"))
    index = indexed(tmp_path)
    alone = {
        (one.path, one.arm, one.budget)
        for name in ("cpu", "gpu")
        for one in tradeoff_points(index, RunFilter(exact={"path": (name,)}), "seconds")
        if one.is_on_frontier
    }
    for axis, price in (("seconds", None), ("cost", 3.0)):
        found = tradeoff_points(index, RunFilter(), axis, price_per_hour=price)  # type: ignore[arg-type]
        assert {(one.path, one.arm, one.budget) for one in found if one.is_on_frontier} == alone
    paid = tradeoff_points(index, RunFilter(), "cost")
    assert {one.path for one in paid if one.is_on_frontier} == {"gpu"}, "money is money"


def test_what_has_no_place_on_the_axis_is_counted(tmp_path: Path) -> None:
    for name, price in (("free", 0.0), ("paid", 2.0), ("unknown", None)):
        write_study(tmp_path / name, small_study(name, price_per_hour=price))
    broken = small_study("broken")
    runs = tuple(replace(run, final=replace(run.final, quality=math.inf)) for run in broken.runs[:3])
    write_study(tmp_path / "broken", replace(broken, runs=(*runs, *broken.runs[3:])))
    index = indexed(tmp_path)
    assert {one.path for one in tradeoff_points(index, RunFilter(), "cost")} == {"paid", "broken"}
    assert left_out(index, RunFilter(), "cost") == LeftOut(num_lost=3, num_unknown=8, num_zero=8)
    assert left_out(index, RunFilter(), "cost", price_per_hour=1.0) == LeftOut(num_lost=3, num_unknown=0, num_zero=0)
    assert left_out(index, RunFilter(exact={"study": ("free",)}), "cost") == LeftOut(0, 0, 8)
    assert left_out(index, RunFilter(), "tokens") == LeftOut(num_lost=3, num_unknown=29, num_zero=0)


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
        ("neg_mean_squared_error", None),
        ("neg_log_loss", None),
        ("-loss", None),
        ("val/-loss", None),
        ("negative_loss", None),
        ("1-accuracy", None),
        ("eval/1 - acc", None),
        ("one minus accuracy", None),
        ("accuracy_gap", None),
        ("loss_scale", None),
        ("top-1 accuracy", True),
        ("accuracy/top-1", True),
        ("recall@1", True),
        ("log-loss", False),
    ],
)
def test_names_that_say_which_way_they_point(name: str, up: bool | None) -> None:
    assert points_up(name) is up
