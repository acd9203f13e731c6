"""Which runs are asked for, in which order: what a page's address says, as SQL with parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cosmati.errors import RunError

NUMBERS = ("steps", "rows", "tokens", "flops", "seconds", "cost", "quality", "budget", "seed")
TEXTS = ("name", "study", "arm", "task", "hardware", "status", "started", "ended", "quality_name", "path", "kind")
MAX_WORDS = 100
"""SQLite refuses deeper conditions than 1,000."""
MODEL = (
    "(SELECT CAST(value AS TEXT) FROM json_each(recipes.facts)"
    " WHERE key IN ('model', 'config.model', 'model.name') ORDER BY key = 'model' DESC, key LIMIT 1)"
)
"""What a recipe calls its model: as Cosmati's own do, or else as other tools' configurations do."""
COLUMNS = tuple(dict.fromkeys((*TEXTS, *NUMBERS)))


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """What a run must be.

    Attributes:
        exact: By column, the values of which it may have any: `{"arm": ("muon", "baseline")}`. `method` asks for runs
            with any of these methods, `model` for those whose recipe names any of these models. A `study` may be told
            from another one of its name by its folder: `Digits (mine/digits)`.
        least: By numeric column, at least this.
        most: By numeric column, at most this.
        text: Words, each a part of its name, study, arm, task or method, in any case.
    """

    exact: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def where(self) -> tuple[str, list[object]]:
        """Return the condition and its parameters.

        Raises:
            RunError: a column that there isn't, or a number that is none.
        """
        terms, values = ["1"], list[object]()
        for column, allowed in self.exact.items():
            marks = ", ".join("?" * len(allowed))
            if column == "method":
                # Runs have few different lists of methods: these are taken apart, and the runs found by an index.
                lists = f"SELECT one.methods FROM method_lists AS one, json_each(one.methods) WHERE value IN ({marks})"
                terms.append(f"methods IN ({lists})")
            elif column == "model":
                terms.append(f"recipe IN (SELECT recipe FROM recipes WHERE {MODEL} IN ({marks}))")
            elif column == "study" and any(text.endswith(")") for text in allowed):
                terms.append(f"(study IN ({marks}) OR study || ' (' || path || ')' IN ({marks}))")
                values += allowed
            else:
                terms.append(f"{_known(column, COLUMNS)} IN ({marks})")
            values += [_number(column, text) for text in allowed] if column in NUMBERS else allowed
        for limits, sign in ((self.least, ">="), (self.most, "<=")):
            for column, limit in limits.items():
                terms.append(f"{_known(column, NUMBERS)} {sign} ?")
                values.append(limit)
        words = self.text.split()
        if len(words) > MAX_WORDS:
            raise RunError(f"{len(words)} words are asked for, and {MAX_WORDS} at most are looked for. Leave some out.")
        for word in words:
            terms.append("instr(words, ?)")
            values.append(word.casefold())
        return " AND ".join(terms), values


def _known(column: str, columns: tuple[str, ...]) -> str:
    if column not in columns:
        msg = f"Runs have no column {column!r} to filter by. There are: {', '.join(columns)}, method, model."
        raise RunError(msg)
    return column


def _number(column: str, text: str) -> float:
    """Return a number that is compared as one: a text of it can have more digits than another."""
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) >= 2**63:
        msg = f"{column} is {text[:40]!r}, which is no number that a run can have. Change it, or leave it out."
        raise RunError(msg)
    return value


def order_of(sort: str, *, descending: bool) -> tuple[str, list[object]]:
    """Return an ORDER BY and its parameters; what a run doesn't have comes last. `metric:x` and `fact:x` sort by those.

    Runs that are equal in it stand as their sources were read.

    Raises:
        RunError: a column that there isn't.
    """
    expression, values = expression_of(sort)
    return f"{expression} {'DESC' if descending else 'ASC'} NULLS LAST, runs.rowid", values


def expression_of(column: str) -> tuple[str, list[object]]:
    """Return the SQL of a column, one's own among them, and its parameters.

    Raises:
        RunError: a column that there isn't.
    """
    kind, _, name = column.partition(":")
    if kind in ("metric", "fact") and name:
        # By key and not by path: a name may hold dots and quotes.
        table = "runs.metrics" if kind == "metric" else "recipes.facts"
        return f"(SELECT value FROM json_each({table}) WHERE key = ?)", [name]
    return _known(column, (*COLUMNS, "methods")), []
