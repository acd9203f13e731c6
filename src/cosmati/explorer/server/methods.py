"""Methods: what the whole store says of each, over all of its studies."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cosmati.errors import RunError
from cosmati.explorer.method_view import ArmFinding, arm_findings, forest_figure, interval_words, verdict_counts
from cosmati.explorer.method_words import exclusive_with, known_methods, method_key, words_of
from cosmati.explorer.palette import PAGE
from cosmati.explorer.server.asked import changed
from cosmati.explorer.server.site import STUDY_FILES, FolderState, Site, record_of, state_of
from cosmati.explorer.wording import AXIS_NAMES, number
from cosmati.store.filters import RunFilter
from cosmati.study.composition import kind_of
from cosmati.study.curves import Axis

WORK_SECONDS = 1.5
"""Of an answer, that go into studies that changed since somebody looked; the page asks again for the rest."""
_NUM_RUNS = 8
_SORTS = ("name", "studies", "faster", "slower", "undecided", "best", "runs")


@dataclass(frozen=True)
class Gathered:
    """Findings of studies: those worked out, how many studies aren't yet, what can't be read, and has no such count."""

    findings: tuple[ArmFinding, ...]
    num_studies: int
    num_waiting: int
    unreadable: tuple[tuple[str, str], ...]
    uncounted: tuple[str, ...] = ()


@dataclass(frozen=True)
class MethodUse:
    """Where a method occurs: its spellings, the folders of its studies, and its runs."""

    key: str
    name: str
    spellings: tuple[str, ...]
    paths: tuple[str, ...]
    num_runs: int


@dataclass(frozen=True)
class MethodRow:
    """A method in the list: `faster`, `slower` and `undecided` count studies' arms that have it alone."""

    use: MethodUse
    studies: int
    faster: int
    slower: int
    undecided: int
    together: int
    together_faster: int
    best: ArmFinding | None

    @property
    def best_text(self) -> str:
        """The largest speed-up that is shown of it alone, with its interval."""
        return f"{number(self.best.ratio)}× ({interval_words(self.best)})" if self.best and self.best.ratio else "—"


def methods_router(site: Site) -> APIRouter:
    """Return the list, and the page of one method."""
    router = APIRouter()

    @router.get("/methods", response_class=HTMLResponse)
    def listing(request: Request) -> HTMLResponse:
        axis, sort = _axis(request), request.query_params.get("sort") or "-studies"
        uses = method_uses(site)
        gathered = gather(site, sorted({path for use in uses.values() for path in use.paths}), axis)
        rows = [_row(use, gathered.findings) for use in uses.values()]
        return site.page(
            request,
            "methods.html",
            title="Methods",
            rows=_sorted(rows, sort),
            headings=[(name, changed(request, sort=_other(sort, name)), _order(sort, name)) for name in _SORTS],
            gathered=gathered,
            studies=_study_titles(site),
            axis=axis,
            axes=AXIS_NAMES,
            again=changed(request),
        )

    @router.get("/methods/{name:any}", response_class=HTMLResponse)
    def method(request: Request, name: str) -> HTMLResponse:
        return _method_page(site, request, name)

    return router


def _method_page(site: Site, request: Request, name: str) -> HTMLResponse:
    use, axis, words = method_uses(site).get(method_key(name)), _axis(request), words_of(name)
    if use is None and words is None:
        raise RunError(f"No run of this store names a method {name[:80]!r}. Choose one from the list of methods.")
    gathered = gather(site, use.paths if use else (), axis)
    names = site.study_names()
    own = [one for one in gathered.findings if method_key(name) in one.parts]
    found = [replace(one, study=names.get(one.path, one.study)) for one in own]
    alone, together = _ordered(found, is_alone=True), _ordered(found, is_alone=False)
    forest = forest_figure([*alone, *together], axis, PAGE)
    chosen = RunFilter(exact={"method": use.spellings}) if use else None
    return site.page(
        request,
        "method.html",
        title=use.name if use else words.name if words else name,
        figures={"forest": forest} if forest else {},
        names=names,
        use=use,
        words=words,
        exclusive=exclusive_with(words) if words else (),
        alone=[(one, interval_words(one)) for one in alone],
        together=[(one, interval_words(one)) for one in together],
        verdicts=verdict_counts(alone),
        gathered=gathered,
        studies=_study_titles(site),
        axis=axis,
        axes=AXIS_NAMES,
        again=changed(request),
        runs=site.index.runs(chosen, limit=_NUM_RUNS) if chosen else [],
    )


def method_uses(site: Site) -> dict[str, MethodUse]:
    """Return each method that the store's runs name, by its key."""
    spellings, paths, runs = defaultdict[str, Counter[str]](Counter), defaultdict[str, set[str]](set), Counter[str]()
    # Runs have few different lists of methods: these are taken apart once each.
    for text, path, kind, num in site.index.answer(
        "SELECT methods, CASE kind WHEN 'study' THEN path ELSE '' END, kind, count(*) FROM runs GROUP BY 1, 2, 3"
    ):
        for key, names in _by_key(json.loads(text)).items():
            spellings[key].update(dict.fromkeys(names, num))
            runs[key] += num
            if kind == "study":
                paths[key].add(path)
    known = known_methods()
    return {
        key: MethodUse(
            key=key,
            name=known[key].name if key in known else kind_of(names.most_common(1)[0][0]),
            spellings=tuple(sorted(names)),
            paths=tuple(sorted(paths[key])),
            num_runs=runs[key],
        )
        for key, names in spellings.items()
    }


def _by_key(names: Sequence[str]) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for name in names:
        found[method_key(name)].append(name)
    return found


def _study_titles(site: Site) -> dict[str, str]:
    """Return what each study is called, by its folder."""
    return {path: name for name, path in site.index.kept(("studies",), site.index.studies)} | site.study_names()


def gather(site: Site, paths: Sequence[str], axis: Axis) -> Gathered:
    """Return what studies say of their arms, as far as it can be worked out in `WORK_SECONDS`."""
    began, findings, unreadable, num_waiting = time.monotonic(), list[ArmFinding](), list[tuple[str, str]](), 0
    uncounted = []
    for path in paths:
        if time.monotonic() - began > WORK_SECONDS:
            num_waiting += 1
            continue
        try:
            folder = site.folder(path)
            found = _findings(folder, state_of(folder, STUDY_FILES), path, axis)
            uncounted += [path] if found is None else []
            findings += found or ()
        except RunError as error:
            unreadable.append((path, str(error)))
    return Gathered(tuple(findings), len(paths), num_waiting, tuple(unreadable), tuple(uncounted))


@lru_cache(maxsize=8192)
def _findings(folder: Path, states: FolderState, path: str, axis: Axis) -> tuple[ArmFinding, ...] | None:
    return arm_findings(record_of(folder, states), path, axis)


def _ordered(found: Sequence[ArmFinding], *, is_alone: bool) -> list[ArmFinding]:
    chosen = [one for one in found if one.is_alone is is_alone]
    return sorted(chosen, key=lambda one: (one.ratio is None, -(one.ratio or 0.0), one.study, one.arm))


def _row(use: MethodUse, findings: Sequence[ArmFinding]) -> MethodRow:
    own = [one for one in findings if use.key in one.parts]
    alone = [one for one in own if one.is_alone]
    faster = [one for one in alone if one.verdict == "faster"]
    slower = [one for one in alone if one.verdict == "slower"]
    return MethodRow(
        use=use,
        studies=len(use.paths),
        faster=len(faster),
        slower=len(slower),
        undecided=len(alone) - len(faster) - len(slower),
        together=len(own) - len(alone),
        together_faster=sum(one.verdict == "faster" for one in own if not one.is_alone),
        best=max(faster, key=lambda one: one.ratio or 0.0, default=None),
    )


def _sorted(rows: Sequence[MethodRow], sort: str) -> list[MethodRow]:
    name = sort.removeprefix("-")
    if name not in _SORTS:
        msg = f"Methods can't be sorted by {name[:80]!r}. Choose one of {', '.join(_SORTS)}."
        raise RunError(msg)
    by_name = sorted(rows, key=lambda one: one.use.name.casefold())
    if name == "name":
        return by_name[::-1] if sort.startswith("-") else by_name

    def value(row: MethodRow) -> float:
        if name == "best":
            return (row.best.ratio or 0.0) if row.best else 0.0
        return row.use.num_runs if name == "runs" else float(getattr(row, name))

    return sorted(by_name, key=value, reverse=sort.startswith("-"))


def _other(sort: str, name: str) -> str:
    """Return the order that a click on a column's head asks for: largest first, names from A on, then the reverse."""
    first, second = (name, f"-{name}") if name == "name" else (f"-{name}", name)
    return second if sort == first else first


def _order(sort: str, name: str) -> str:
    return "ascending" if sort == name else "descending" if sort == f"-{name}" else "none"


def _axis(request: Request) -> Axis:
    axis = request.query_params.get("axis") or "seconds"
    if axis not in AXIS_NAMES:
        msg = f"There's no axis {axis[:80]!r}. Choose one of {', '.join(AXIS_NAMES)}."
        raise RunError(msg)
    return axis
