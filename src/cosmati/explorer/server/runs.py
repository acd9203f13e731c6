"""The table of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cosmati.explorer.server.asked import PAGE_SIZE, Asked, asked, changed
from cosmati.explorer.server.site import Site
from cosmati.explorer.wording import amount, number
from cosmati.store.summary import RunSummary

STANDARD = ("study", "arm", "status", "budget", "seed", "quality", "seconds", "steps", "started")


@dataclass(frozen=True)
class Heading:
    """A column's head: its name, the address that sorts by it, and how it's sorted now."""

    name: str
    address: str
    order: str


def runs_router(site: Site) -> APIRouter:
    """Return the table of runs."""
    router = APIRouter()

    @router.get("/runs", response_class=HTMLResponse)
    def runs(request: Request) -> HTMLResponse:
        what = asked(request)
        num = site.index.count(what.filter)
        found = site.index.runs(
            what.filter,
            sort=what.sort,
            descending=what.descending,
            limit=PAGE_SIZE,
            offset=what.page * PAGE_SIZE,
        )
        columns = (*STANDARD, *what.columns)
        return site.page(
            request,
            "runs.html",
            title="Runs",
            num_runs=num,
            num_pages=math.ceil(num / PAGE_SIZE),
            asked=what,
            headings=[_heading(request, what, name) for name in columns],
            rows=[(run, [cell(run, name) for name in columns]) for run in found],
            choices={name: site.index.choices(name) for name in ("study", "arm", "method", "status", "hardware")},
            turn=lambda page: changed(request, page=str(page)),
        )

    return router


def _heading(request: Request, what: Asked, name: str) -> Heading:
    is_sorted = what.sort == name
    other = name if is_sorted and what.descending else f"-{name}"
    order = ("descending" if what.descending else "ascending") if is_sorted else "none"
    return Heading(name, changed(request, sort=other), order)


def cell(run: RunSummary, column: str) -> str:
    """Return what a table says of a run in a column; a dash where it has no such thing."""
    kind, _, name = column.partition(":")
    value = (
        run.metrics.get(name) if kind == "metric" else run.facts.get(name) if kind == "fact" else getattr(run, column)
    )
    if value in (None, "", ()):
        return "–"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool | str):
        return str(value)
    if column == "seconds":
        return amount(value, "seconds")
    return f"{value:,}" if isinstance(value, int) else number(value, 4)
