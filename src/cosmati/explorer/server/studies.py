"""The page of one study, the same sections that its bundle has; and what in the store can't be read."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cosmati.explorer.opening import opening_sentences
from cosmati.explorer.server.parts import study_context, study_parts
from cosmati.explorer.server.site import Site


def studies_router(site: Site) -> APIRouter:
    """Return the page of a study, and that of problems."""
    router = APIRouter()

    @router.get("/studies/{path:any}", response_class=HTMLResponse)
    def study(request: Request, path: str) -> HTMLResponse:
        view = site.study(path)
        return site.page(
            request,
            "study.html",
            title=site.study_names().get(path, view.record.name),
            figures=study_parts(site, path),
            views=(view,),
            run=None,
            study_path=path,
            opening=opening_sentences([view.record], None),
            **study_context(site, path),
        )

    @router.get("/problems", response_class=HTMLResponse)
    def problems(request: Request) -> HTMLResponse:
        found = site.index.problems()
        return site.page(request, "problems.html", title="What can't be read", problems=found)

    return router
