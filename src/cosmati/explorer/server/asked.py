"""What a page's address asks for: filter, order, columns, axis. And back: the address of a page that asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlencode

from fastapi import Request

from cosmati.errors import RunError
from cosmati.store.filters import NUMBERS, RunFilter, expression_of

EXACT = (
    "study",
    "task",
    "arm",
    "method",
    "model",
    "hardware",
    "status",
    "budget",
    "seed",
    "quality_name",
    "kind",
    "path",
)
PAGE_SIZES = (25, 50, 100, 250, 1000)
PAGE_SIZE = 100
MAX_COLUMNS = 100
MAX_CHOSEN = 200
"""Values of a filter: each has a chip whose address holds all others."""
MOST_COMMON = "*most*"
"""In place of a task: the one with most of the chosen runs. No task is called that."""


@dataclass(frozen=True)
class Asked:
    """An address, read.

    Attributes:
        filter: Which runs.
        sort: Column to order by.
        descending: Whether the largest comes first.
        columns: Columns of the table, such as `metric:accuracy` or `fact:config.seed`, beside the usual ones.
        has_own_columns: Whether `columns` are all of them.
        page: From 0.
        page_size: Runs on a page.
    """

    filter: RunFilter
    sort: str
    descending: bool
    columns: tuple[str, ...]
    has_own_columns: bool
    page: int
    page_size: int


def asked(request: Request) -> Asked:
    """Read a request's address.

    Raises:
        RunError: a number that is none, a column that there isn't, or more than a page can hold.
    """
    query = request.query_params
    exact = {}
    for name in EXACT:
        values = [one for one in query.getlist(name) if one and (name, one) != ("task", MOST_COMMON)]
        if values:
            exact[name] = tuple(dict.fromkeys(values))
    if (num := sum(map(len, exact.values()))) > MAX_CHOSEN:
        raise RunError(f"{num} values are chosen, and {MAX_CHOSEN} at most are. Leave some out, or search by words.")
    sort = query.get("sort", "-started") or "-started"
    columns = tuple(dict.fromkeys(one for one in query.getlist("column") if one))
    if len(columns) > MAX_COLUMNS:
        raise RunError(f"{len(columns)} columns are asked for, and {MAX_COLUMNS} at most are shown. Leave some out.")
    for one in columns:
        expression_of(one)  # refuses what no run has
    page_size = query.get("size", "") or str(PAGE_SIZE)
    if page_size not in map(str, PAGE_SIZES):
        raise RunError(f"size is {page_size[:40]!r} in this address. Choose one of {', '.join(map(str, PAGE_SIZES))}.")
    return Asked(
        filter=RunFilter(
            exact=exact,
            least=_limits(request, "min_"),
            most=_limits(request, "max_"),
            text=query.get("text", ""),
        ),
        sort=sort.removeprefix("-"),
        descending=sort.startswith("-"),
        columns=columns,
        has_own_columns=query.get("columns") == "own",
        page=int(number_of(query.get("page", "") or "0", "page")),
        page_size=int(page_size),
    )


def _limits(request: Request, prefix: str) -> dict[str, float]:
    found = {name: request.query_params.get(prefix + name, "") for name in NUMBERS}
    return {name: number_of(text, prefix + name) for name, text in found.items() if text}


def number_of(text: str, name: str) -> float:
    """Return the number that an address has under a name.

    Raises:
        RunError: it's none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (name == "page" and (value < 0 or value > 1e9)):
        msg = f"{name} is {text!r} in this address, which is no number that can be meant. Change it, or leave it out."
        raise RunError(msg)
    return value


def changed(request: Request, **changes: str | None) -> str:
    """Return the address of the same page with other values; None takes one away. The page number starts anew."""
    changes = {"page": None, **changes}
    kept = [(name, value) for name, value in request.query_params.multi_items() if name not in changes]
    kept += [(name, value) for name, value in changes.items() if value is not None]
    return address(request.url.path, kept)


def without(request: Request, name: str, value: str) -> str:
    """Return the address of the same page without one value of a name."""
    kept = [one for one in request.query_params.multi_items() if one not in ((name, value), ("page", one[1]))]
    return address(request.url.path, kept)


def address(path: str, asked_for: list[tuple[str, str]]) -> str:
    """Return an address; what is empty is left out, but for `task`, which means all tasks when it's empty."""
    kept = told(asked_for)
    return f"{path}?{urlencode(kept)}" if kept else path


def told(asked_for: Iterable[tuple[str, str]], *without: str) -> list[tuple[str, str]]:
    """Return what an address says, without empty values and some names; an empty `task` says something."""
    return [(name, value) for name, value in asked_for if (value or name == "task") and name not in without]
