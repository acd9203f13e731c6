"""The table of runs: its columns, what stands in them, and the same as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from fastapi import Request

from cosmati.explorer.figures import csv_text
from cosmati.explorer.server.asked import Asked, changed
from cosmati.explorer.wording import amount, number
from cosmati.store.filters import COLUMNS, RunFilter, expression_of
from cosmati.store.index import RunIndex
from cosmati.store.summary import RunSummary

STANDARD = ("study", "arm", "status", "budget", "seed", "quality", "seconds", "steps", "started")
FURTHER = tuple(name for name in (*COLUMNS, "methods") if name not in (*STANDARD, "name"))
NUMERIC = frozenset({"budget", "seed", "quality", "seconds", "steps", "rows", "tokens", "flops", "cost"})
TITLES = {"seconds": "training time", "flops": "FLOPs", "quality_name": "measure"}
MAX_NAMES, CSV_RUNS = 400, 5000
CellKind = Literal["number", "text", "time", "status", "none"]


@dataclass(frozen=True)
class Heading:
    """A column's head: its name as it's asked for, in words, the address that sorts by it, and how it's sorted now."""

    name: str
    title: str
    address: str
    order: str
    is_numeric: bool


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, of which kind it is, and the whole of what the text shortens."""

    text: str
    kind: CellKind
    whole: str = ""


@dataclass(frozen=True)
class ColumnGroup:
    """Columns of a kind, and how many more of it aren't listed."""

    kind: str
    columns: tuple[ColumnChoice, ...]
    num_more: int


@dataclass(frozen=True)
class ColumnChoice:
    """A column that can be chosen: its name, in words, and whether it's shown."""

    name: str
    title: str
    is_shown: bool


def columns_of(what: Asked) -> tuple[str, ...]:
    """Return the table's columns.

    Raises:
        RunError: one that there isn't.
    """
    columns = what.columns if what.has_own_columns else (*STANDARD, *what.columns)
    for name in columns:
        expression_of(name)
    return tuple(dict.fromkeys(name for name in columns if name != "name"))


def heading(request: Request, what: Asked, name: str, cells: Sequence[Cell]) -> Heading:
    """Return a column's head; `cells` are the column's."""
    is_sorted = what.sort == name
    other = name if is_sorted and what.descending else f"-{name}"
    order = ("descending" if what.descending else "ascending") if is_sorted else "none"
    kinds = {one.kind for one in cells} - {"none"}
    is_numeric = name in NUMERIC or kinds == {"number"}
    return Heading(name, title_of(name), changed(request, sort=other), order, is_numeric)


def title_of(name: str) -> str:
    """Return a column's name in words."""
    kind, _, own = name.partition(":")
    return own if kind in ("metric", "fact") and own else TITLES.get(name, name.replace("_", " "))


def cell(run: RunSummary, column: str, names: Mapping[str, str]) -> Cell:
    """Return what a table says of a run in a column; a dash where it has no such thing.

    Args:
        run: of the row.
        column: of the table.
        names: of studies whose own name isn't enough, by folder.
    """
    value = value_of(run, column)
    if column == "study" and value:
        return Cell(names.get(run.path, run.study), "text")
    if value in (None, "", ()):
        return Cell("–", "none")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(_figure(value, column), "number", f"{value!r} s" if column == "seconds" else repr(value))
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if column == "status":
        return Cell(text, "status", text.replace(" ", "-"))
    return Cell(text[:16].replace("T", " "), "time", text) if column in ("started", "ended") else Cell(text, "text")


def _figure(value: float, column: str) -> str:
    if column == "seconds":
        return amount(value, "seconds")
    if column in ("seed", "budget") or column.startswith("fact:"):  # as they were written
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value, 4)


def value_of(run: RunSummary, column: str) -> object:
    """Return a run's value in a column, None where it has none."""
    kind, _, name = column.partition(":")
    if kind == "metric":
        return run.metrics.get(name)
    return run.facts.get(name) if kind == "fact" else getattr(run, column)


def column_choices(index: RunIndex, chosen: RunFilter, shown: Sequence[str]) -> list[ColumnGroup]:
    """Return what the chosen runs have to show, by kind: facts in which they differ, and those that all share."""
    metrics, facts = index.column_names(chosen)
    named = {
        "Of a run": (*STANDARD, *FURTHER),
        "Metrics": [f"metric:{name}" for name in metrics],
        "Of the recipe, where runs differ": [f"fact:{name}" for name, differs in facts if differs],
        "Of the recipe, the same in all": [f"fact:{name}" for name, differs in facts if not differs],
    }
    listed = {
        kind: [name for place, name in enumerate(names) if place < MAX_NAMES or name in shown]
        for kind, names in named.items()
        if names
    }
    return [
        ColumnGroup(
            kind,
            tuple(ColumnChoice(name, title_of(name), name in shown) for name in names),
            len(named[kind]) - len(names),
        )
        for kind, names in listed.items()
    ]


def run_lines(index: RunIndex, what: Asked, columns: Sequence[str]) -> Iterator[str]:
    """Yield all chosen runs as CSV in the table's order, figures as they are; a piece is some thousand lines."""
    header: Sequence[str] = ("key", "name", "path", *columns)
    runs = index.each_run(what.filter, sort=what.sort, descending=what.descending, page=CSV_RUNS)
    while (found := list(islice(runs, CSV_RUNS))) or header:
        rows = [[run.key, run.name, run.path, *(_plain(value_of(run, name)) for name in columns)] for run in found]
        yield csv_text(header, rows).removeprefix("\r\n")
        header = ()


def _plain(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value
