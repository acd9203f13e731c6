"""Who reaches a quality first, against what a study's own page reads off; and where no figure may stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cosmati.explorer.reaching import Reached, line_range, usual_line, who_reaches
from cosmati.store.filters import RunFilter
from cosmati.store.tradeoffs import TradeoffPoint, tradeoff_points
from cosmati.study.comparison import NotReached, speed_up_at_equal_quality
from tests.explorer.samples import demo_study
from tests.store.samples import indexed, run_record, write_run, write_study


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
