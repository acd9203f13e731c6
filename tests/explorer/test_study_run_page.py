"""The page of one run of a study: its place among the seeds, its twin, and where its links lead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.explorer.palette import LIGHT
from cosmati.explorer.study_run_view import StudyRunView, study_run_figures, study_run_view
from cosmati.store.summary import key_of
from tests.explorer.samples import demo_study
from tests.explorer.test_server import Served, data_of

STUDY = demo_study(num_seeds=4)


def view_of(arm: str = "composed", seed: int = 2) -> StudyRunView:
    return study_run_view(STUDY, arm, 1.0, seed)


def qualities(arm: str) -> dict[int, float]:
    return {run.seed: run.final.quality for run in STUDY.runs if (run.arm, run.budget) == (arm, 1.0)}


@pytest.mark.parametrize("seed", range(4))
def test_its_place_and_its_gap_are_those_of_the_study(seed: int) -> None:
    view, own = view_of(seed=seed), qualities("composed")
    place = 1 + sum(other > own[seed] for other in own.values())
    assert f"Of 4 seeds of its arm at this budget it is number {place}" in view.place
    assert f"reach from {max(own.values()):.4f} to {min(own.values()):.4f}" in view.place
    gap = own[seed] - qualities("baseline")[seed]
    shown = next(row[-1] for row in view.seed_rows() if row[0].seed == seed)
    shown, better = shown.split(", ")
    assert math.isclose(float(shown.replace("−", "-")), gap, rel_tol=0.01)
    assert better == ("better" if gap > 0 else "worse")
    assert ("better" if gap > 0 else "worse") in view.against_baseline
    assert "isn't evidence" in view.against_baseline


def test_a_measure_that_points_down_turns_the_words_round() -> None:
    down = replace(STUDY, higher_is_better=False)
    for seed in range(4):
        up_words = study_run_view(STUDY, "composed", 1.0, seed).against_baseline
        down_words = study_run_view(down, "composed", 1.0, seed).against_baseline
        assert ("better" in up_words) == ("worse" in down_words)
        rows = [study_run_view(one, "composed", 1.0, seed).seed_rows()[seed][-1] for one in (STUDY, down)]
        assert rows[0].split(", ")[0] == rows[1].split(", ")[0]
        assert {one.split(", ")[1] for one in rows} == {"better", "worse"}


def test_one_seed_a_diverged_run_and_a_seed_without_twin_are_said() -> None:
    alone = replace(STUDY, runs=tuple(run for run in STUDY.runs if run.seed == 2))
    equal = replace(STUDY, runs=tuple(replace(run, final=STUDY.runs[0].final) for run in STUDY.runs))
    places = {study_run_view(equal, "composed", 1.0, seed).place for seed in range(4)}
    assert len(places) == 1
    assert f"it is number 1 by {STUDY.quality_name}, as 3 others;" in places.pop()
    assert "only seed of its arm" in study_run_view(alone, "composed", 1.0, 2).place
    runs = tuple(
        replace(run, final=replace(run.final, quality=math.nan)) if (run.arm, run.seed) == ("composed", 2) else run
        for run in STUDY.runs
        if (run.arm, run.seed) != ("baseline", 1)
    )
    study = replace(STUDY, runs=runs)
    diverged = study_run_view(study, "composed", 1.0, 2)
    two = replace(study, runs=tuple(run for run in study.runs if run.seed in (2, 3)))
    assert study_run_view(two, "composed", 1.0, 3).place.endswith("all others diverged.")
    assert "diverged" in diverged.place
    assert "diverged" in diverged.against_baseline
    assert study_run_figures(diverged, LIGHT)
    assert "no run of seed 1" in study_run_view(study, "composed", 1.0, 1).against_baseline
    assert "is the study's baseline" in study_run_view(study, "baseline", 1.0, 2).against_baseline
    with pytest.raises(RunError, match="no run of composed at budget 1 and seed 77"):
        study_run_view(study, "composed", 1.0, 77)


def test_figures_hold_every_seed_and_its_twin() -> None:
    found = study_run_figures(view_of(), LIGHT)
    rows = [line.split(",") for line in found["seeds"].csv.splitlines()[1:]]
    for arm in ("composed", "baseline"):
        assert {int(seed): float(value) for name, seed, value in rows if name == arm} == qualities(arm)
    curve = [line.split(",") for line in found["curve"].csv.splitlines()[1:]]
    assert {(row[0], int(row[1])) for row in curve} == {("composed", seed) for seed in range(4)} | {("baseline", 2)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    evil = "a/b & <script>alert(1)</script>"
    arms = tuple(replace(arm, name=evil) if arm.name == "composed" else arm for arm in STUDY.arms)
    runs = tuple(replace(run, arm=evil) if run.arm == "composed" else run for run in STUDY.runs)
    for name, study in (("digits", STUDY), ("evil", replace(STUDY, name=evil, arms=arms, runs=runs))):
        (store / name).mkdir()
        (store / name / "study.json").write_text(study.to_json())
    found = Served(store)
    yield found
    found.close()


@pytest.mark.parametrize(("folder", "arm"), [("digits", "composed"), ("digits", "baseline"), ("evil", None)])
def test_every_link_of_the_page_leads_somewhere(served: Served, folder: str, arm: str | None) -> None:
    arm = arm or next(run.arm for run in served.index.runs(limit=1000) if "script" in run.arm)
    page = served.get(f"/runs/{key_of(folder, arm, 1.0, 2)}")[1]
    assert "<script>alert" not in page
    links = {unescape(link) for link in re.findall(r'<a [^>]*href="(/[^"]+)"', page)}
    assert f"/runs/{key_of(folder, arm, 1.0, 1)}" in links, "the seed before"
    assert f"/runs/{key_of(folder, arm, 1.0, 3)}" in links, "the next one"
    assert f"/runs/{key_of(folder, arm, 0.5, 2)}" in links, "the same seed at another budget"
    assert f"/studies/{folder}" in links
    if arm != "baseline":
        twin = key_of(folder, "baseline", 1.0, 2)
        assert f"/compare?a={twin}&b={key_of(folder, arm, 1.0, 2)}" in links
    for link in sorted(links):
        assert served.get(link)[0] == 200, link


def test_the_first_seed_has_none_before_it(served: Served) -> None:
    page = served.get(f"/runs/{key_of('digits', 'composed', 1.0, 0)}")[1]
    assert 'rel="prev"' not in page
    assert 'rel="next"' in page
    assert {"curve", "seeds"} <= set(data_of(page)["figures"])


def test_a_study_that_is_removed_meanwhile_is_said(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "study.json").write_text(STUDY.to_json())
    found = Served(tmp_path)
    try:
        (tmp_path / "gone" / "study.json").unlink()
        status, page, _ = found.get(f"/runs/{key_of('gone', 'composed', 1.0, 2)}")
        assert status == 404
        assert "moved or removed" in page
    finally:
        found.close()
