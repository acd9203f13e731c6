"""Parts of a study's page that are fetched when they are looked at: figures below the first one, and further axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure
from cosmati.explorer.rendering import embedded_json
from cosmati.explorer.server.site import Site
from cosmati.explorer.views import StudyView, live_data
from cosmati.study.curves import Axis


def parts_router(site: Site) -> APIRouter:
    """Return the addresses of studies' figures and levels."""
    router = APIRouter()

    @router.get("/figures/{path:any}")
    def figure(request: Request, path: str) -> Response:
        name = request.query_params.get("name", "")
        found = _figure(site, path, name)
        if request.query_params.get("form") == "csv":
            return csv_answer(found.csv, name)
        return _json_answer({"figures": {name: {"plot": found.plot}}})

    @router.get("/levels/{path:any}")
    def levels(request: Request, path: str) -> Response:
        axis = cast("Axis", request.query_params.get("axis", ""))
        view = site.study(path, axis)
        names = _names(view, axis)
        figures = {name: {"plot": one.plot} for name, one in site.study_figures(path, axis).items() if name in names}
        return _json_answer({"figures": figures, "studies": {view.anchor: live_data(view)}})

    return router


def _json_answer(value: object) -> Response:
    return Response(embedded_json(value), media_type="application/json")


def csv_answer(text: str, name: str) -> Response:
    """Return CSV as a file of a name."""
    return Response(text.encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=attachment(name))


def attachment(name: str) -> dict[str, str]:
    """Return the headers of an answer that is saved as a CSV file of a name."""
    kept = "".join(character if character.isalnum() or character in "-_" else "-" for character in name)
    return {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(kept)}.csv"}


def study_parts(site: Site, path: str, axis: Axis | None = None) -> dict[str, Figure]:
    """Return the figures of a study's page: the first comes with it, the others have addresses."""
    view = site.study(path, axis)
    first = _names(view, view.axes[0][0])[0] if view.axes else ""
    return {
        name: replace(
            one,
            csv="",
            address="" if name == first else _address(path, name=name),
            csv_address=_address(path, name=name, form="csv"),
        )
        for name, one in site.study_figures(path, axis).items()
    }


def study_context(site: Site, path: str, axis: Axis | None = None) -> dict[str, Any]:
    """Return what the template of a study is given, and the page's script."""
    view = site.study(path, axis)
    return {
        "view": view,
        "study_title": site.study_names().get(path, view.record.name),
        "levels_address": f"/levels/{quote(path)}",
        "data": {"studies": {view.anchor: live_data(view)}},
    }


def _address(path: str, **asked: str) -> str:
    return f"/figures/{quote(path)}?{urlencode(asked)}"


def _names(view: StudyView, axis: Axis) -> tuple[str, str]:
    """Return the names of an axis' figures, as `axis_figures` has them."""
    return f"{view.anchor}-tradeoff-{axis}", f"{view.anchor}-learning-{axis}"


def _figure(site: Site, path: str, name: str) -> Figure:
    view = site.study(path)
    axis = next((axis for axis, _ in view.axes if name in _names(view, axis)), None)
    found = site.study_figures(path, axis).get(name)
    if found is None:
        raise RunError(f"The study {view.record.name} has no figure {name[:80]!r}. Open the study's page again.")
    return found
