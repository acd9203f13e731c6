"""Two runs of the store beside one another, and the choice of them."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cosmati.explorer.compare_view import CompareView, compare_figures
from cosmati.explorer.compared_run import ComparedRun, of_folder, of_study
from cosmati.explorer.palette import PAGE
from cosmati.explorer.server.live import found_run
from cosmati.explorer.server.run import study_of
from cosmati.explorer.server.site import Site
from cosmati.store.filters import RunFilter
from cosmati.store.summary import RunSummary

NUM_OFFERED = 40


def compare_router(site: Site) -> APIRouter:
    """Return the page of a comparison."""
    router = APIRouter()

    @router.get("/compare", response_class=HTMLResponse)
    def compare(request: Request, a: str = "", b: str = "", text: str = "") -> HTMLResponse:
        if not (a and b):
            return _choose(site, request, found_run(site, a or b) if a or b else None, is_second=bool(b), text=text)
        runs = [found_run(site, key) for key in (a, b)]
        view = CompareView(*(_read(site, one) for one in runs))
        return site.page(
            request,
            "compare.html",
            title=f"{_label(runs[0])} and {_label(runs[1])}",
            view=view,
            sides=[(letter, one, _label(one)) for letter, one in zip("AB", runs, strict=True)],
            swapped=f"/compare?{urlencode({'a': b, 'b': a})}",
            figures=compare_figures(view, PAGE),
            names=site.study_names(),
        )

    return router


def _read(site: Site, found: RunSummary) -> ComparedRun:
    if found.kind == "study":
        return of_study(study_of(site, found.path), found)
    return of_folder(site.folder(found.path), found)


def _label(run: RunSummary) -> str:
    return f"{run.arm}, seed {run.seed}" if run.kind == "study" else run.name


def _choose(site: Site, request: Request, chosen: RunSummary | None, *, is_second: bool, text: str) -> HTMLResponse:
    exact: dict[str, tuple[str, ...]] = {}
    if chosen is not None and not text:
        # What stands to it best first: of its own study and budget, or of its own kind.
        exact = {"path": (chosen.path,)} if chosen.kind == "study" else {"kind": ("run",)}
        if chosen.budget is not None:
            exact["budget"] = (str(chosen.budget),)
    found = site.index.runs(RunFilter(exact=exact, text=text), limit=10 * NUM_OFFERED)
    offered = [one for one in found if chosen is None or one.key != chosen.key]
    if chosen is not None:
        offered.sort(key=lambda one: (one.arm != chosen.arm and one.seed != chosen.seed, not one.is_baseline))
    own, other = ("b", "a") if is_second else ("a", "b")
    kept = {own: chosen.key} if chosen else {}
    return site.page(
        request,
        "choose.html",
        title="Compare two runs",
        chosen=chosen,
        label=_label(chosen) if chosen else "",
        letter=own.upper() if chosen else "",
        own=own,
        text=text,
        offered=[(one, f"/compare?{urlencode({**kept, (other if chosen else 'a'): one.key})}") for one in offered][
            :NUM_OFFERED
        ],
        num_found=len(offered),
        names=site.study_names(),
    )
