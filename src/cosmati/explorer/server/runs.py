"""The table of runs."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse

from cosmati.errors import RunError
from cosmati.explorer.server.asked import PAGE_SIZES, address, asked, changed, told
from cosmati.explorer.server.filter_bar import filter_bar
from cosmati.explorer.server.run_table import cell, column_choices, columns_of, heading, run_lines
from cosmati.explorer.server.site import Site
from cosmati.store.filters import expression_of


def runs_router(site: Site) -> APIRouter:
    """Return the table of runs."""
    router = APIRouter()

    @router.get("/runs", response_class=HTMLResponse)
    def runs(request: Request) -> HTMLResponse:
        what = asked(request)
        columns, names = columns_of(what), site.study_names()
        num = site.index.count(what.filter)
        found = site.index.runs(
            what.filter,
            sort=what.sort,
            descending=what.descending,
            limit=what.page_size,
            offset=what.page * what.page_size,
        )
        rows = [(run, [cell(run, name, names) for name in columns]) for run in found]
        heads = [
            heading(request, what, name, [cells[place] for _, cells in rows]) for place, name in enumerate(columns)
        ]
        sort = heading(request, what, "name", ())
        return site.page(
            request,
            "runs.html",
            title="Runs",
            num_runs=num,
            has_runs=bool(num or site.index.count()),
            num_pages=math.ceil(num / what.page_size),
            asked=what,
            bar=filter_bar(site, request, what, own=("size",)),
            headings=[sort, *heads],
            rows=rows,
            page_sizes=PAGE_SIZES,
            columns=column_choices(site.index, what.filter, columns),
            usual=changed(request, column=None, columns=None),
            kept=told(request.query_params.multi_items(), "column", "columns", "page"),
            csv_address=address("/runs.csv", request.query_params.multi_items()),
            turn=lambda page: changed(request, page=str(page)),
        )

    @router.get("/runs.csv")
    def lines(request: Request) -> StreamingResponse:
        what = asked(request)
        expression_of(what.sort)  # refused before the answer begins
        headers = {"Content-Disposition": "attachment; filename=runs.csv"}
        found = run_lines(site.index, what, columns_of(what))
        encoded = (text.encode("utf-8", "replace") for text in found)
        return StreamingResponse(encoded, media_type="text/csv; charset=utf-8", headers=headers)

    @router.get("/runs/compare")
    def compare(request: Request) -> RedirectResponse:
        keys = dict.fromkeys(request.query_params.getlist("key"))
        if len(keys) != 2:
            raise RunError(f"{len(keys)} runs are chosen, and two are compared. Go back, and choose two.")
        return RedirectResponse(address("/compare", list(zip("ab", keys, strict=True))), status_code=303)

    return router
