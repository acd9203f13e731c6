"""Governance: which runs of the store had a policy, and what the ledger of one says, once it has verified."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from cosmati.errors import RunError
from cosmati.explorer.palette import PAGE
from cosmati.explorer.report import run_context
from cosmati.explorer.run_figures import run_figures
from cosmati.explorer.server.checks import LedgerChecks, state_of_run, time_text
from cosmati.explorer.server.site import Site
from cosmati.explorer.wording import weight_text
from cosmati.records.governance import GovernanceFacts
from cosmati.store.scan import is_plain
from cosmati.store.summary import RunSummary

WAIT_SECONDS = 1.0
"""For a ledger's verification; a page that comes before its end asks again."""
_MAX_RUNS = 200
_FIGURES = ("policy-", "shares", "schedule", "contribution-")


@dataclass(frozen=True)
class TaughtRow:
    """What the ledger says of one class in one region; `nothing` says why it taught nothing, empty where it did."""

    class_name: str
    weights: tuple[str, ...]
    num_steps: int
    num_rows: int
    share: float
    has_share: bool
    nothing: str
    command: str


def governance_router(site: Site) -> APIRouter:
    """Return the list of governed runs, and the page of one."""
    router, checks = APIRouter(), LedgerChecks(site.keys_of)

    def governed(key: str) -> RunSummary:
        found = site.index.run(key)
        if found is None or not found.is_governed:
            raise RunError(f"This store has no governed run {key[:40]}. Choose one from the list.")
        return found

    @router.get("/governance", response_class=HTMLResponse)
    def listing(request: Request) -> HTMLResponse:
        runs = _governed_runs(site)
        rows = [(run, _signed_size(site.folder(run.path)), _status(checks, site.folder(run.path))) for run in runs]
        return site.page(request, "governed_runs.html", title="Governance", rows=rows, most=_MAX_RUNS)

    @router.get("/governance/{key}", response_class=HTMLResponse)
    def governance(request: Request, key: str) -> HTMLResponse:
        run = governed(key)
        folder = site.folder(run.path)
        found, going = checks.ask(folder, wait=WAIT_SECONDS)
        view = found.view if found else None
        facts = view.governance if view else None
        figures = run_figures(view, PAGE) if view else {}
        region = request.query_params.get("region") or (facts.regions[0] if facts and facts.regions else "")
        return site.page(
            request,
            "governance.html",
            title=f"Governance: {run.name}",
            figures={name: figure for name, figure in figures.items() if name.startswith(_FIGURES)},
            found=run,
            checked=found,
            checked_at=time_text(found.ended) if found else "",
            going=going,
            level=view.ledger.evidence if view and view.ledger else "",
            region=region,
            taught=_taught(facts, region, folder) if facts else (),
            again=f"/governance/{key}?region={quote(region, safe='')}",
            **run_context(view),
        )

    @router.post("/governance/{key}/check")
    def check(request: Request, key: str) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise RunError("Another site asked for this. Open the page and press its button.")
        checks.ask(site.folder(governed(key).path), wait=WAIT_SECONDS, anew=True)
        return RedirectResponse(f"/governance/{key}", status_code=303)

    return router


def _governed_runs(site: Site) -> list[RunSummary]:
    """Return the governed runs, the latest first, `_MAX_RUNS` at most."""
    keys = site.index.answer("SELECT key FROM runs WHERE is_governed ORDER BY started DESC, key LIMIT ?", [_MAX_RUNS])
    found = [site.index.run(key) for (key,) in keys]
    return [run for run in found if run is not None]


def _signed_size(folder: Path) -> str:
    """Return how many entries the ledger's checkpoint says that it covers, unverified; empty where there's none."""
    path = folder / "ledger" / "checkpoint"
    if not is_plain(path):
        return ""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            size = file.read(4096).split("\n")[1]
    except (OSError, IndexError):
        return ""
    return f"{int(size):,}" if size.isdecimal() and len(size) < 20 else ""


def _status(checks: LedgerChecks, folder: Path) -> tuple[str, str]:
    """Return in words what the last check of a run found, and whether that is good or bad."""
    found = checks.known(folder)
    if found is None:
        return "not checked since the server began", ""
    if found.state != state_of_run(folder):
        return "has changed since it was checked", ""
    if found.view is None:
        return "can't be read", "unmet"
    ledger = found.view.ledger
    if ledger is None:
        return "no ledger", "unmet"
    if ledger.problems:
        return "doesn't verify", "unmet"
    return f"verified at {ledger.level}, {time_text(found.ended)}", "met"


def _taught(facts: GovernanceFacts, region: str, folder: Path) -> tuple[TaughtRow, ...]:
    """Return what the ledger says of one region, class by class.

    Raises:
        RunError: it names no such region.
    """
    if region not in facts.regions:
        msg = f"The ledger names no region {region[:80]!r}. It has: {', '.join(facts.regions)}."
        raise RunError(msg)
    totals = {one.class_name: one for one in facts.totals if one.region == region and one.num_rows}
    came = {one.class_name for one in facts.totals}
    rows = []
    for name in facts.classes:
        total = totals.get(name)
        weights = tuple(weight_text(facts.weight[name][phase].get(region, 0.0)) for phase in facts.phases)
        command = shlex.join(["cosmati", "ledger", "query", str(folder), "--class", name, "--region", region])
        counts = (total.num_steps, total.num_rows, total.share, total.has_share) if total else (0, 0, 0.0, True)
        nothing = "no step that stands gave it any weight here" if name in came else "no row of it taught any region"
        rows.append(TaughtRow(name, weights, *counts, "" if total else nothing, command))
    return tuple(rows)
