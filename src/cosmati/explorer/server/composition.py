"""The composition view: which studies have parts, and what one says of them alone, in pairs and together."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cosmati.errors import RunError
from cosmati.explorer.composition_figures import CELL_WIDTH, alone_figure, matrix_figure
from cosmati.explorer.composition_page import MEASURE_WORDS, PartsView, joint_rows, parts_view
from cosmati.explorer.figures import breakdown_figure
from cosmati.explorer.palette import PAGE
from cosmati.explorer.server.site import STUDY_FILES, FolderState, Site, record_of, state_of
from cosmati.explorer.views import part_rows, time_notes
from cosmati.explorer.wording import AXIS_NAMES, noise_sentences
from cosmati.records.study import StudyRecord
from cosmati.study.composition import Measure, kind_of
from cosmati.study.curves import Axis, available_axes
from cosmati.study.noise import NOISE_ARM, noise_arm

_MOST_BARS = 14


@dataclass(frozen=True)
class StudyParts:
    """A study of the list: how many parts it has alone, in pairs and in larger compositions."""

    name: str
    path: str
    num_alone: int
    num_pairs: int
    num_larger: int
    num_runs: int


def composition_router(site: Site) -> APIRouter:
    """Return the list, and the page of one study."""
    router = APIRouter()

    @router.get("/composition", response_class=HTMLResponse)
    def listing(request: Request) -> HTMLResponse:
        found, num_without = studies_with_parts(site)
        return site.page(request, "compositions.html", title="Composition", studies=found, num_without=num_without)

    @router.get("/composition/{path:any}", response_class=HTMLResponse)
    def composition(request: Request, path: str) -> HTMLResponse:
        record = site.record(path)
        name = site.study_names().get(path, record.name)
        axis, measure = _chosen(request, record)
        folder = site.folder(path)
        view = _parts_view(folder, state_of(folder, STUDY_FILES), axis, measure)
        figures = {"alone": alone_figure(view, PAGE)} if any(one.value is not None for one in view.gains) else {}
        matrix = matrix_figure(view, PAGE)
        if matrix is not None:
            figures["pairs"] = matrix
        timed = _timed(record)
        times = [row for arm in timed.arms for row in part_rows(timed, arm.name)]
        if times:
            figures["breakdown"] = breakdown_figure(timed, PAGE)
        return site.page(
            request,
            "composition.html",
            title=f"Composition: {name}",
            name=name,
            figures=figures,
            view=view,
            study=record,
            study_path=path,
            axes=[(axis, AXIS_NAMES[axis]) for axis in available_axes(record)],
            measures=MEASURE_WORDS,
            joint=joint_rows(view),
            matrix_width=140 + CELL_WIDTH * len({arm for one in view.pairs for arm in one.alone}),
            noise=noise_sentences(record, axis=axis) if available_axes(record) else (),
            times=times,
            time_notes=time_notes(record),
            num_arms_timed=(len(timed.arms), len(record.arms)),
        )

    return router


@lru_cache(maxsize=64)
def _parts_view(folder: Path, states: FolderState, axis: Axis, measure: Measure) -> PartsView:
    return parts_view(record_of(folder, states), axis, measure)


def studies_with_parts(site: Site) -> tuple[list[StudyParts], int]:
    """Return the store's studies that have arms with parts, and how many studies have none."""
    # A study's baseline comes first: what its double has is no part.
    sql = """
        SELECT path, study, arm, methods, is_baseline, count(*) FROM runs
        WHERE kind = 'study' GROUP BY 1, 2, 3, 4, 5 ORDER BY 2, 1, 5 DESC
    """
    counts: dict[tuple[str, str], list[int]] = {}
    of_baseline: dict[str, set[str]] = {}
    for path, study, arm, text, is_baseline, num_runs in site.index.answer(sql):
        found, methods = counts.setdefault((study, path), [0, 0, 0, 0]), set(json.loads(text))
        if is_baseline:
            of_baseline[path] = methods
        is_double = arm == NOISE_ARM and methods <= of_baseline.get(path, set())
        num_parts = 0 if is_baseline or is_double else len({kind_of(one) for one in methods})
        if num_parts:
            found[min(num_parts, 3) - 1] += 1
        found[3] += num_runs
    names = site.study_names()
    made = [StudyParts(names.get(path, study), path, *found) for (study, path), found in counts.items()]
    with_parts = [one for one in made if one.num_alone + one.num_pairs + one.num_larger]
    return sorted(with_parts, key=lambda one: -one.num_pairs), len(made) - len(with_parts)


def _chosen(request: Request, record: StudyRecord) -> tuple[Axis, Measure]:
    """Return axis and measure that the address asks for.

    Raises:
        RunError: there's no such axis, or no such measure.
    """
    axes = available_axes(record) or ("seconds",)
    axis = request.query_params.get("axis") or axes[0]
    measure = request.query_params.get("measure") or "speed-up"
    for name, value, allowed in (("axis", axis, tuple(axes)), ("measure", measure, tuple(MEASURE_WORDS))):
        if value not in allowed:
            msg = f"This study has no {name} {value!r}. Choose one of {', '.join(allowed)}."
            raise RunError(msg)
    return cast("Axis", axis), cast("Measure", measure)


def _timed(record: StudyRecord) -> StudyRecord:
    """Return the study with the baseline and the arms of one part alone: whose time is broken down."""
    chosen = [one for one in record.arms if one.name == record.baseline_arm]
    chosen += [one for one in record.arms if len(one.methods) == 1 and one.name != noise_arm(record)]
    names = {one.name for one in chosen[:_MOST_BARS]}
    runs = tuple(run for run in record.runs if run.arm in names)
    return replace(record, arms=tuple(one for one in record.arms if one.name in names), runs=runs, registration=None)
