"""The page of one run: a folder of its own, a run of a study, or what another tool left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure
from cosmati.explorer.palette import PAGE
from cosmati.explorer.recipe_code import ABOUT_THE_FOLDER, recipe_code
from cosmati.explorer.rendering import embedded_json, safe_markup
from cosmati.explorer.report import run_context
from cosmati.explorer.run_figures import run_figures
from cosmati.explorer.run_view import RunView, read_run, with_ledger_of
from cosmati.explorer.server.checks import CheckedRun, LedgerChecks, time_text
from cosmati.explorer.server.curves import curve_answer, with_addresses
from cosmati.explorer.server.live import duration, found_run, own_run, panel, shown_job
from cosmati.explorer.server.site import Site, shown_figures
from cosmati.explorer.study_run_view import cards_of, part_rows, point_rows, study_run_figures, study_run_view
from cosmati.records.study import StudyRecord
from cosmati.store.filters import RunFilter
from cosmati.store.reading import study_record
from cosmati.store.scan import LINES_FILE, PLANNED_FILE, RUN_FILE, STARTED_FILE, STUDY_FILE, plain_bytes
from cosmati.store.summary import Fact, RunSummary, key_of

WAIT_SECONDS = 0.3
"""For the verification of a running job's ledger; what takes longer follows by itself."""
_MAX_NEAR = 500
_MAX_READ = 20
"""Records of other seeds that are opened for one page."""
Neighbours = tuple[RunSummary | None, RunSummary | None]


class _Digests(msgspec.Struct):
    digests: dict[str, str]


def run_router(site: Site) -> APIRouter:
    """Return the page of a run."""
    router, checks = APIRouter(), LedgerChecks(site.keys_of)

    @router.get("/runs/{key}", response_class=HTMLResponse)
    def run(request: Request, key: str) -> HTMLResponse:
        found = found_run(site, key)
        return _study_run(site, request, found) if found.kind == "study" else _own_run(site, request, found, checks)

    @router.get("/runs/{key}/ledger", response_class=HTMLResponse)
    def ledger(key: str) -> Response:
        found = own_run(site.index.run(key), key)
        folder = site.folder(found.path)
        checked, going = checks.ask(folder, if_new=False)
        if going is not None:
            return Response(status_code=204)  # the page leaves as it is what it shows, and asks again
        view = checked.view if checked and checked.view else read_run(folder, has_ledger=False)
        figures = _figures(view, found.key)
        data = safe_markup(embedded_json({"figures": shown_figures(figures), "studies": {}}))
        context = {**_check_context(checked, None), **run_context(view), "figures": figures, "found": found}
        text = site.templates.get_template("site/checked_ledger.html").render(**context, part_data=data)
        return HTMLResponse(text, headers={"Cache-Control": "no-store"})

    @router.get("/runs/{key}/curve.csv")
    def curve(key: str, file: str = "", measure: str = "") -> Response:
        return curve_answer(site.folder(own_run(site.index.run(key), key).path), file, measure)

    return router


def _own_run(site: Site, request: Request, found: RunSummary, checks: LedgerChecks) -> HTMLResponse:
    folder = site.folder(found.path)
    job = shown_job(folder)
    # A long ledger takes seconds, and a running job's is another one at each look: nobody waits for that.
    is_later = job.state.is_going and (folder / "ledger").is_dir()
    checked, going = checks.ask(folder, wait=WAIT_SECONDS, anew=True) if is_later else (None, None)
    view = read_run(folder, has_ledger=not is_later, keys=None if is_later else site.keys_of(folder))
    if checked and checked.view:
        view = with_ledger_of(view, checked.view)
    return site.page(
        request,
        "run.html",
        title=view.record.run_id,
        figures=_figures(view, found.key),
        is_later=is_later,
        found=found,
        neighbours=neighbours(site, found),
        code=recipe_code(view.record.recipe_text),
        views=(),
        **panel(site, job),
        **run_context(view),
        **_check_context(checked, going),
        part_data="",
    )


def _figures(view: RunView, key: str) -> dict[str, Figure]:
    return with_addresses(run_figures(view, PAGE, has_curves_csv=False), view, key)


def _check_context(checked: CheckedRun | None, going: float | None) -> dict[str, Any]:
    """Return what the part about a running job's ledger is given."""
    return {
        "checked": checked,
        "began": time_text(checked.ended - checked.seconds) if checked else "",
        "took": duration(checked.seconds) if checked else "",
        "is_checking": going is not None,
    }


def _study_run(site: Site, request: Request, found: RunSummary) -> HTMLResponse:
    study = study_of(site, found.path)
    assert found.budget is not None, "a run of a study has one"
    view = study_run_view(study, found.arm, found.budget, found.seed)
    keys = {one.seed: key_of(found.path, found.arm, found.budget, one.seed) for one in view.peers}
    paired = {seed: key_of(found.path, study.baseline_arm, found.budget, seed) for seed in view.paired}
    budgets = sorted({one.budget for one in study.runs if (one.arm, one.seed) == (found.arm, found.seed)})
    context: dict[str, Any] = {
        "cards": cards_of(view, found.cost),
        "parts": part_rows(view),
        "points": point_rows(view),
        "keys": keys,
        "paired": paired,
        "budgets": [(budget, key_of(found.path, found.arm, budget, found.seed)) for budget in budgets],
        "study_name": site.study_names().get(found.path, found.study),
        "code": recipe_code(view.arm.recipe_text, seed=found.seed, budget=found.budget),
    }
    title = f"{found.arm}, seed {found.seed}"
    figures = study_run_figures(view, PAGE)
    near = neighbours(site, found)
    return site.page(
        request, "study_run.html", title=title, figures=figures, found=found, view=view, neighbours=near, **context
    )


def neighbours(site: Site, found: RunSummary) -> Neighbours:
    """Return the runs of the same arm or recipe, and data, with the seed before and the one after."""
    same = {"arm": (found.arm,), "kind": (found.kind,)}
    if found.kind == "study":
        same |= {"path": (found.path,), "budget": (str(found.budget),)}
    runs = site.index.runs(RunFilter(exact=same), sort="seed", descending=False, limit=_MAX_NEAR)
    if found.kind == "run":  # which are all called alike where nobody named them
        facts = _without_seed(found)
        runs = [one for one in runs if one.seed != found.seed and _without_seed(one) == facts]
    before = [one for one in runs if one.seed < found.seed]
    after = [one for one in runs if one.seed > found.seed]
    return _of_same_data(site, found, before[::-1]), _of_same_data(site, found, after)


def _without_seed(run: RunSummary) -> dict[str, Fact]:
    beside = {"seed", *ABOUT_THE_FOLDER}
    return {name: fact for name, fact in run.facts.items() if name.removeprefix("config.") not in beside}


def _of_same_data(site: Site, found: RunSummary, runs: Sequence[RunSummary]) -> RunSummary | None:
    """Return the first of some runs whose data are those of another one; a study's are, by its own word."""
    if found.kind == "study" or not runs:
        return runs[0] if runs else None
    data = _data_digest(site, found)
    return next((one for one in runs[:_MAX_READ] if _data_digest(site, one) == data), None)


def _data_digest(site: Site, run: RunSummary) -> object:
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        record = msgspec.json.decode(plain_bytes(site.folder(run.path) / RUN_FILE), type=_Digests)
        return record.digests.get("data", "")
    return None


def study_of(site: Site, path: str) -> StudyRecord:
    """Return the record of a study in a folder of the store, read once for each state of its files.

    Raises:
        RunError: it can't be read, or there's none.
    """
    folder = site.folder(path)
    states = []
    for name in (STUDY_FILE, STARTED_FILE, PLANNED_FILE, LINES_FILE):
        with contextlib.suppress(OSError):
            state = (folder / name).stat()
            states.append((name, state.st_mtime_ns, state.st_size))
    return _record(folder, tuple(states))


@lru_cache(maxsize=8)
def _record(folder: Path, states: tuple[tuple[str, int, int], ...]) -> StudyRecord:
    if not states:
        raise RunError(f"{folder.name} holds no study any more. It was moved or removed: choose one from the list.")
    return study_record(folder)
