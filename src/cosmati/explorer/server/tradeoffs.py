"""The first page: quality against what it takes, over all studies and runs of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from cosmati.errors import RunError
from cosmati.explorer.cloud import (
    AXIS_WORDS,
    GROUPINGS,
    CloudLook,
    cloud_csv,
    cloud_figure,
    drawn_points,
    position_text,
)
from cosmati.explorer.palette import PAGE
from cosmati.explorer.reaching import line_range, usual_line, who_reaches
from cosmati.explorer.rendering import embedded_json, safe_markup
from cosmati.explorer.server.asked import MOST_COMMON, Asked, address, asked, number_of, told
from cosmati.explorer.server.filter_bar import filter_bar
from cosmati.explorer.server.parts import csv_answer, study_context, study_parts
from cosmati.explorer.server.site import Site, shown_figures
from cosmati.explorer.wording import number
from cosmati.store.tradeoffs import (
    COST_AXES,
    OUTCOMES,
    CostAxis,
    LeftOut,
    TradeoffPoint,
    left_out,
    quality_names,
    tradeoff_points,
)
from cosmati.study.curves import Axis
from cosmati.study.hardware import price_of, read_catalogue

OWN = ("quality_name", "axis", "price", "colour")
STUDY_AXES: dict[CostAxis, Axis] = {
    "seconds": "seconds",
    "cost": "seconds",
    "steps": "step",
    "rows": "rows",
    "tokens": "tokens",
    "flops": "flops",
}
_OF_STUDY = ("study", "path", "task", "quality_name", "kind")
MAX_ROWS, MAX_STUDIES, MAX_ARMS = 200, 12, 8


@dataclass(frozen=True)
class Drawn:
    """What the page draws: its points, and how."""

    what: Asked
    axis: CostAxis
    price: str
    points: Sequence[TradeoffPoint]
    look: CloudLook
    left_out: LeftOut

    @property
    def is_limited(self) -> bool:
        """Whether points are chosen by their means."""
        return bool({*self.what.filter.least, *self.what.filter.most} & set(OUTCOMES))

    @property
    def num_runs(self) -> int:
        """Runs behind the points."""
        return sum(one.n for one in self.points)


def tradeoffs_router(site: Site) -> APIRouter:
    """Return the first page, and what belongs to it."""
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse)
    def tradeoffs(request: Request) -> HTMLResponse:
        return _page(site, request)

    @router.get("/chosen-study", response_class=HTMLResponse)
    def chosen_study(request: Request) -> HTMLResponse:
        path, axis = request.query_params.get("path", ""), _axis(request)
        section = _study_section(site, path, axis, asked(request))
        shown = shown_figures(section["figures"])
        data = safe_markup(embedded_json({"figures": shown, **section.pop("data")}))
        text = site.templates.get_template("site/chosen_study.html").render(**section, data=data)
        return HTMLResponse(text)

    @router.get("/reached", response_class=HTMLResponse)
    def reached(request: Request) -> HTMLResponse:
        drawn = _drawn(site, request)
        text = site.templates.get_template("site/reached.html").render(**_reach_context(drawn))
        at = address("/", request.query_params.multi_items())
        return HTMLResponse(text, headers={"HX-Replace-Url": at})

    @router.get("/tradeoffs.csv")
    def points(request: Request) -> Response:
        drawn = _drawn(site, request)
        return csv_answer(cloud_csv(drawn.points, drawn.look), "tradeoffs")

    return router


def _page(site: Site, request: Request) -> HTMLResponse:
    drawn = _drawn(site, request)
    path, section = _one_study(drawn), dict[str, Any]()
    # A filter is answered at once; what a study comes to takes longer, and follows by itself.
    is_later = bool(path) and request.headers.get("hx-request") == "true"
    if path:  # its own section has the line, with intervals
        drawn = replace(drawn, look=replace(drawn.look, line=None))
    figure = cloud_figure(drawn.points, PAGE, drawn.look)
    figures = {"cloud": replace(figure, csv_address=address("/tradeoffs.csv", request.query_params.multi_items()))}
    if path and not is_later:
        section = _study_section(site, path, drawn.axis, drawn.what)
        figures |= section.pop("figures")
    page = site.page(
        request,
        "tradeoffs.html",
        title=_title(drawn),
        figures=figures,
        path_of_study=path,
        later=_later(request, path, drawn) if is_later else "",
        bar=filter_bar(site, request, drawn.what, own=OWN, is_one_task=True),
        axis=drawn.axis,
        axes=AXIS_WORDS,
        price=drawn.price,
        is_chosen={name: bool(request.query_params.get(name)) for name in ("quality_name", "colour")},
        catalogue=read_catalogue(),
        qualities=quality_names(site.index, drawn.what.filter),
        groupings=GROUPINGS,
        num_runs=drawn.num_runs if drawn.is_limited else site.index.count(drawn.what.filter),
        is_limited=drawn.is_limited,
        left_out=_left_out_sentences(drawn),
        points=drawn.points,
        rows=_rows(drawn),
        kept=told(request.query_params.multi_items(), "at"),
        has_runs=bool(site.index.count()),
        **_reach_context(drawn),
        **section,
    )
    page.headers["Vary"] = "HX-Request"
    return page


def _study_section(site: Site, path: str, axis: CostAxis, what: Asked) -> dict[str, Any]:
    """Return what the section of the study that is chosen is given: its figures and data among it."""
    wanted = STUDY_AXES[axis]
    first = wanted if wanted in dict(site.study(path).axes) else None
    context = study_context(site, path, first)
    return {"figures": study_parts(site, path, first), "left_aside": _left_aside(what), **context}


def _left_aside(what: Asked) -> tuple[str, ...]:
    """Return the filters that choose among a study's runs, which its curves are of as a whole."""
    limits = dict.fromkeys((*what.filter.least, *what.filter.most))
    names = dict.fromkeys([*(name for name in what.filter.exact if name not in _OF_STUDY), *limits])
    return (*(name.replace("_", " ") for name in names), *(["search"] if what.filter.text else []))


def _later(request: Request, path: str, drawn: Drawn) -> str:
    """Return the address of the chosen study's section, with the filters that it leaves aside."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if name not in (*_OF_STUDY, *OWN, "at")]
    return address("/chosen-study", [("path", path), ("axis", drawn.axis), *kept])


def _axis(request: Request) -> CostAxis:
    axis = request.query_params.get("axis", "") or "seconds"
    if axis not in COST_AXES:
        raise RunError(f"There's no axis {axis[:80]!r}. Choose one of {', '.join(COST_AXES)}.")
    return axis


def _drawn(site: Site, request: Request) -> Drawn:
    """Work out what an address asks to be drawn.

    Raises:
        RunError: it asks for what there isn't.
    """
    query, what = request.query_params, _of_one_task(site, asked(request), request)
    axis = _axis(request)
    hardware = query.get("price", "")
    price = price_of(hardware, read_catalogue()).price_per_hour if hardware else None
    points = tradeoff_points(site.index, what.filter, axis, price_per_hour=price)
    names = quality_names(site.index, what.filter)
    quality = (what.filter.exact.get("quality_name") or tuple(name for name, _ in names[:1]) or ("",))[0]
    grouping = query.get("colour", "") or ("study" if len({one.path for one in points}) > 1 else "arm")
    if grouping not in GROUPINGS:
        raise RunError(f"There's no colour by {grouping[:80]!r}. Choose one of {', '.join(GROUPINGS)}.")
    look = CloudLook(
        quality=quality,
        axis=axis,
        grouping=grouping,
        line=_line(points, query.get("at", "")),
        names=site.study_names(),
        recipes=site.index.recipe_texts({one.recipe for one in drawn_points(points)}),
        is_priced=axis == "cost" and price is not None,
    )
    without = left_out(site.index, what.filter, axis, price_per_hour=price)
    return Drawn(what, axis, hardware, points, look, without)


def _left_out_sentences(drawn: Drawn) -> str:
    """Return which of the chosen runs are in no point and why, in sentences; empty where all are."""
    found, words = drawn.left_out, AXIS_WORDS[drawn.axis]
    texts = []
    if found.num_lost:
        texts.append(f"{_runs(found.num_lost)} diverged or failed: no mean has them.")
    if found.num_unknown and drawn.axis == "cost" and not drawn.price:
        texts.append(f"{_runs(found.num_unknown)} recorded no price: choose one under \u201cPrice of\u201d.")
    elif found.num_unknown:
        texts.append(f"{_runs(found.num_unknown)} recorded no {words}.")
    if found.num_zero:
        what = "cost nothing, at a price of 0" if drawn.axis == "cost" and not drawn.price else f"took no {words}"
        texts.append(f"{_runs(found.num_zero)} {what}: a logarithmic axis has no place for that.")
    return " ".join(texts)


def _runs(num: int) -> str:
    return f"{num:,} run{'s' * (num != 1)}"


def _one_study(drawn: Drawn) -> str:
    """Return the folder of the study that the address chose, empty where it's none or several."""
    paths = {point.path for point in drawn.points}
    is_chosen = {"study", "path"} & set(drawn.what.filter.exact) and len(paths) == 1 and drawn.points[0].study
    return paths.pop() if is_chosen else ""


def _line(points: Sequence[TradeoffPoint], asked_for: str) -> float | None:
    """Return where the quality line lies: as asked, where that is among the points."""
    limits = line_range(points)
    if limits is None:
        return None
    at = number_of(asked_for, "at") if asked_for else usual_line(points)
    return at if limits[0] <= at <= limits[1] else usual_line(points)


def _of_one_task(site: Site, what: Asked, request: Request) -> Asked:
    """Take the task with most runs, unless the address says which: a frontier over several tasks says nothing."""
    if request.query_params.get("task", MOST_COMMON) != MOST_COMMON:
        return what
    tasks = [value for value, _ in site.index.choices("task", what.filter) if value]
    if len(tasks) < 2:
        return what
    exact = {**what.filter.exact, "task": (str(tasks[0]),)}
    return replace(what, filter=replace(what.filter, exact=exact))


def _title(drawn: Drawn) -> str:
    studies = {drawn.look.names.get(one.path, one.study) for one in drawn.points}
    where = f" · {studies.pop()}" if len(studies) == 1 else ""
    return f"{drawn.look.quality or 'Quality'} against {AXIS_WORDS[drawn.axis]}{where}"


def _reach_context(drawn: Drawn) -> dict[str, Any]:
    """Return what the quality line's part of the page shows."""
    look, limits = drawn.look, line_range(drawn.points)
    found = who_reaches(drawn.points, look.line) if look.line is not None else ()
    return {
        "look": look,
        "limits": limits,
        "reached": found[:MAX_STUDIES],
        "num_other_studies": len(found[MAX_STUDIES:]),
        "num_shown_arms": MAX_ARMS,
        "position": lambda value: position_text(value, drawn.axis),
        "axis_words": AXIS_WORDS[drawn.axis],
    }


def _rows(drawn: Drawn) -> list[tuple[TradeoffPoint, str, str]]:
    """Return the points of the table: the frontier's first, then the baselines', then the others."""
    ranked = sorted(drawn.points, key=lambda one: (not one.is_on_frontier, not one.is_baseline, one.position))
    found = ranked[:MAX_ROWS]
    spread = ["" if one.error is None else f" ± {number(one.error, 2)}" for one in found]
    return [
        (one, position_text(one.position, drawn.axis), number(one.quality, 4) + error)
        for one, error in zip(found, spread, strict=True)
    ]
