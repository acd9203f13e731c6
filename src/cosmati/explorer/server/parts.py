"""Parts of a study's page that are fetched when they are looked at: figures below the first one, and further axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure
from cosmati.explorer.server.site import Site
from cosmati.explorer.views import StudyView, axis_figures, live_data, study_figures, with_axis
from cosmati.study.curves import Axis


def parts_router(site: Site) -> APIRouter:
    """Return the addresses of studies' figures and levels."""
    router = APIRouter()

    @router.get("/figures/{path:path}")
    def figure(request: Request, path: str) -> Response:
        name = request.query_params.get("name", "")
        found = _figure(site.study(path), name)
        if request.query_params.get("form") == "csv":
            return csv_answer(found.csv, name)
        return JSONResponse({"figures": {name: {"plot": found.plot}}})

    @router.get("/levels/{path:path}")
    def levels(request: Request, path: str) -> JSONResponse:
        axis = cast("Axis", request.query_params.get("axis", ""))
        view = with_axis(site.study(path), axis)
        figures = {name: {"plot": one.plot} for name, one in axis_figures(view, axis).items()}
        return JSONResponse({"figures": figures, "studies": {view.anchor: live_data(view)}})

    return router


def csv_answer(text: str, name: str) -> Response:
    """Return CSV as a file of a name."""
    kept = "".join(character if character.isalnum() or character in "-_" else "-" for character in name)
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(kept)}.csv"}
    return Response(text.encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=headers)


def study_parts(view: StudyView, path: str) -> dict[str, Figure]:
    """Return a study's figures for its page: the first comes with it, the others have addresses."""
    first = f"{view.anchor}-tradeoff-{view.axes[0][0]}" if view.axes else ""
    return {
        name: replace(
            one,
            csv="",
            address="" if name == first else _address(path, name=name),
            csv_address=_address(path, name=name, form="csv"),
        )
        for name, one in study_figures(view).items()
    }


def study_context(view: StudyView, path: str) -> dict[str, Any]:
    """Return what the template of a study is given beside its view."""
    return {"view": view, "levels_address": f"/levels/{quote(path)}"}


def _address(path: str, **asked: str) -> str:
    return f"/figures/{quote(path)}?{urlencode(asked)}"


def _figure(view: StudyView, name: str) -> Figure:
    kind, _, axis = name.removeprefix(f"{view.anchor}-").partition("-")
    if kind in ("tradeoff", "learning") and axis in dict(view.axes):
        return axis_figures(view, axis)[name]
    found = study_figures(replace(view, levels={})).get(name)  # those that no axis has
    if found is None:
        raise RunError(f"The study {view.record.name} has no figure {name[:80]!r}. Open the study's page again.")
    return found
