"""What a page's address asks for: filter, order, columns, axis. And back: the address of a page that asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlencode

from fastapi import Request

from cosmati.errors import RunError
from cosmati.store.filters import NUMBERS, RunFilter, expression_of

EXACT = ("study", "task", "arm", "method", "hardware", "status", "budget", "seed", "quality_name", "kind")
PAGE_SIZE = 100
MAX_COLUMNS = 100


@dataclass(frozen=True)
class Asked:
    """An address, read.

    Attributes:
        filter: Which runs.
        sort: Column to order by.
        descending: Whether the largest comes first.
        columns: Further columns of the table, such as `metric:accuracy` or `fact:config.seed`.
        page: From 0.
    """

    filter: RunFilter
    sort: str
    descending: bool
    columns: tuple[str, ...]
    page: int


def asked(request: Request) -> Asked:
    """Read a request's address.

    Raises:
        RunError: a number that is none, or a column that there isn't.
    """
    query = request.query_params
    exact = {name: tuple(found) for name in EXACT if (found := [one for one in query.getlist(name) if one])}
    sort = query.get("sort", "-started") or "-started"
    columns = tuple(dict.fromkeys(one for one in query.getlist("column") if one))
    if len(columns) > MAX_COLUMNS:
        raise RunError(f"{len(columns)} columns are asked for, and {MAX_COLUMNS} at most are shown. Leave some out.")
    for one in columns:
        expression_of(one)  # refuses what no run has
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
        page=int(_number(query.get("page", "0"), "page")),
    )


def _limits(request: Request, prefix: str) -> dict[str, float]:
    found = {name: request.query_params.get(prefix + name, "") for name in NUMBERS}
    return {name: _number(text, prefix + name) for name, text in found.items() if text}


def _number(text: str, name: str) -> float:
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
    return f"{request.url.path}?{urlencode(kept)}" if kept else request.url.path
