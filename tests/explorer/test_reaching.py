"""Who reaches a quality first, against what a study's own page reads off; and where no figure may stand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.explorer.reaching import Reached, line_range, usual_line, who_reaches
from cosmati.store.filters import RunFilter
from cosmati.store.tradeoffs import TradeoffPoint, tradeoff_points
from cosmati.study.comparison import NotReached, speed_up_at_equal_quality
from tests.explorer.samples import demo_study
from tests.store.samples import indexed, run_record, write_run, write_study
from tests.study.oracles import log_quality, study


def points_of(root: Path, **exact: tuple[str, ...]) -> list[TradeoffPoint]:
    return tradeoff_points(indexed(root), RunFilter(exact=exact), "seconds")


def by_arm(points: list[TradeoffPoint], quality: float) -> dict[str, Reached]:
    (found,) = who_reaches(points, quality)
    return {one.arm: one for one in found.reached}


def test_needs_and_ratios_are_those_of_the_studys_own_page(tmp_path: Path) -> None:
    study = demo_study(num_seeds=3)
    write_study(tmp_path / "a", study)
    points = points_of(tmp_path)
    low, high = line_range(points) or (0.0, 0.0)
    num_read = 0
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        quality = low + share * (high - low)
        found = by_arm(points, quality)
        for arm in (one.name for one in study.arms if one.name not in ("baseline", "aa")):
            wanted = speed_up_at_equal_quality(study, arm, quality=quality)
            if isinstance(wanted, NotReached):
                assert arm not in found or found[arm].ratio is None
                continue
            num_read += 1
            assert found[arm].ratio == pytest.approx(wanted.ratio, rel=1e-9)
            assert found[arm].needs == pytest.approx(wanted.arm_needs, rel=1e-9)
            assert found[arm].ratio_sign == ("≥" if wanted.is_at_least else "≤" if wanted.is_at_most else "")
    assert num_read > 12


def test_no_figure_stands_where_a_curve_does_not_reach(tmp_path: Path) -> None:
    write_study(tmp_path / "a", demo_study(num_seeds=2))
    points = points_of(tmp_path)
    _, high = line_range(points) or (0.0, 0.0)
    (found,) = who_reaches(points, high)
    assert [one.arm for one in found.reached] == ["composed"]
    assert found.reached[0].ratio is None
    assert found.reached[0].why == "the baseline doesn't reach it"
    assert set(found.not_reached) == {"baseline", "label smoothing", "progressive", "freezing", "aa"}
    without = [one for one in points if one.arm != "baseline"]
    assert by_arm(without, usual_line(points))["composed"].why == "the baseline isn't among these runs"


def test_studies_and_runs_by_themselves_are_not_compared(tmp_path: Path) -> None:
    study = demo_study(num_seeds=2)
    write_study(tmp_path / "a", study)
    slow = tuple(replace(run, final=replace(run.final, seconds=9 * run.final.seconds)) for run in study.runs)
    write_study(tmp_path / "b", replace(study, runs=slow))
    write_run(tmp_path / "r", run_record(metrics={"accuracy": 0.99}))
    points = points_of(tmp_path)
    first, second, alone = who_reaches(points, usual_line(points))
    assert (first.path, second.path, alone.path) == ("a", "b", "")
    ratios = [{one.arm: one.ratio for one in group.reached if one.ratio} for group in (first, second)]
    assert len(ratios[0]) > 2
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-9), "each over its own baseline"
    assert [(one.ratio, one.why) for one in alone.reached] == [(None, "no study, so not compared")]
    assert alone.reached[0].is_bound


def test_lower_is_better_turns_the_line(tmp_path: Path) -> None:
    study = demo_study(num_seeds=2)
    turned = tuple(replace(run, final=replace(run.final, quality=1 - run.final.quality)) for run in study.runs)
    write_study(tmp_path / "up", study)
    write_study(tmp_path / "down", replace(study, runs=turned, quality_name="loss", higher_is_better=False))
    up, down = points_of(tmp_path, quality_name=("accuracy",)), points_of(tmp_path, quality_name=("loss",))
    assert usual_line(down) == pytest.approx(1 - usual_line(up))
    needs = [{one.arm: one.needs for one in who_reaches(*each)[0].reached} for each in ((up, 0.9), (down, 0.1))]
    assert needs[0] == pytest.approx(needs[1], rel=1e-6)
    assert needs[0]


def test_a_measure_of_no_direction_has_no_line() -> None:
    point = TradeoffPoint("p", "", "a", False, None, "", 1, 1.0, 0.5, None, "k", (), "r", None, False)
    assert line_range([point, replace(point, quality=0.7)]) is None
    assert who_reaches([point], 0.5) == ()
    assert line_range([]) is None


def test_a_curve_that_begins_with_no_gain_gives_a_bound_only(tmp_path: Path) -> None:
    """Where the second budget is no better than the first, the first may be more than it needs."""
    flat, rises = ({0.25: 0.5, 0.5: second, 1.0: 0.7} for second in (0.5, 0.6))
    record = study({"baseline": lambda b, s: rises[b], "flat": lambda b, s: flat[b]}, budgets=(0.25, 0.5, 1.0))
    write_study(tmp_path / "a", record)
    found = by_arm(points_of(tmp_path), 0.5)
    assert {arm: one.is_bound for arm, one in found.items()} == {"baseline": False, "flat": True}
    assert [one.needs for one in found.values()] == pytest.approx([250.0] * 2)
    assert found["flat"].ratio == pytest.approx(1.0)
    assert found["flat"].ratio_sign == "≥"


@pytest.mark.parametrize("faster", ["fragile", "baseline"])
def test_who_mostly_diverges_has_no_ratio_there(tmp_path: Path, faster: str) -> None:
    """The runs that are left flatter it. Elsewhere on its curve it has one, and the slower one may diverge."""
    gains = {"fragile": 0.01, "baseline": -0.01}
    record = study({"baseline": log_quality(), "fragile": log_quality(gains[faster])}, seeds=range(10))
    few, many = {3: 0.5, 6: 0.5}, {3: 1.0, 4: 1.0, 5: 1.0}

    def lost(budget: float, seed: int) -> bool:
        return few.get(seed) == budget or many.get(seed) == budget

    runs = [
        replace(run, final=replace(run.final, quality=math.nan), error="killed" if run.seed == 3 else "")
        if run.arm == faster and lost(run.budget, run.seed)
        else run
        for run in record.runs
    ]
    write_study(tmp_path / "a", replace(record, runs=tuple(runs)))
    points = points_of(tmp_path)
    curve = {one.budget: one.quality for one in points if one.arm == faster}
    # At a budget its own losses count, 2 of 10; between two those of both, 2 of 20 and 3 of 20.
    for quality, is_shown in (
        (curve[0.5], False),
        (curve[0.75], True),
        ((curve[0.25] + curve[0.5]) / 2, True),
        ((curve[0.5] + curve[0.75]) / 2, True),
        ((curve[0.75] + curve[1.0]) / 2, False),
    ):
        one = by_arm(points, quality)["fragile"]
        assert (one.ratio is not None) is is_shown
        whose = "its" if faster == "fragile" else "the baseline's"
        assert one.why == ("" if is_shown else f"too many of {whose} runs diverged or failed there")
    assert by_arm(points, curve[0.5])[faster].lost == "5 of 40 runs diverged or failed"
    (found,) = who_reaches(points, curve[0.5])
    assert [one.arm for one in found.reached][-1] == faster, "who mostly diverges doesn't come first"
    (found,) = who_reaches(points, 0.95)
    assert f"{faster} (5 of 40 runs diverged or failed)" in found.not_reached


def test_a_budget_whose_runs_are_all_lost_counts_between_its_neighbours(tmp_path: Path) -> None:
    record = study({"baseline": log_quality(), "fragile": log_quality(0.05)}, seeds=range(4))
    runs = [
        replace(run, final=replace(run.final, quality=math.nan)) if (run.arm, run.budget) == ("fragile", 0.75) else run
        for run in record.runs
    ]
    write_study(tmp_path / "a", replace(record, runs=tuple(runs)))
    points = points_of(tmp_path)
    curve = {one.budget: one.quality for one in points if one.arm == "fragile"}
    assert set(curve) == {0.25, 0.5, 1.0}
    assert by_arm(points, (curve[0.5] + curve[1.0]) / 2)["fragile"].ratio is None
    assert by_arm(points, (curve[0.25] + curve[0.5]) / 2)["fragile"].ratio is not None
