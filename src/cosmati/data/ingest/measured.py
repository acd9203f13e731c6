"""What was measured of each row before it's written: its band, its grades, and which classes it belongs to besides.

    trust = policy.measures["trust"]
    rows = measure(rows, grades={"trust": of_field("score", trust.read)}, also=of_field("topics"))

Rows of different kinds become sources of their own (see `write_dataset`), so that what was measured is signed with the
shards: a row says it once, here, and nothing in a run measures it again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmati.data.graded import SourceKind
from cosmati.data.ingest.rows import Rows, check_class_path
from cosmati.errors import DataError

MAX_KINDS = 256
"""Kinds of rows in one write: each has shards of its own, and one in memory while it's filled."""
OfRow = Callable[[Mapping[str, Any]], Any]
"""Gives what was measured of a row; raises ValueError, such as DataError, where it can't."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def measure(
    rows: Rows,
    *,
    band: int | OfRow = 0,
    grades: Mapping[str, str | OfRow] | None = None,
    also: Sequence[str] | OfRow = (),
) -> Rows:
    """Say what was measured of rows, of all of them or by a function of each.

    A row is bad where a function fails with a ValueError, or gives what no manifest can say.

    Args:
        rows: of a reader.
        band: number of the quality band, from 0 (`Bands.read`, `Bands.band_of`).
        grades: a word by measure (`Grading.read`, `Grading.grade_of`).
        also: other classes to which rows belong, too: they teach what all of these may.

    Raises:
        DataError: something was measured of the rows already, or what is said of all of them can't be.
    """
    if rows.kind_of is not None:
        raise DataError("Something was measured of these rows already, and would be lost. Say all of it in one call.")
    named = dict(sorted((grades or {}).items()))

    def kind_of(row: Mapping[str, Any]) -> SourceKind:
        told = tuple((name, _grade(name, _told(own, row))) for name, own in named.items())
        others = {*_classes(_told(also, row))} - {rows.class_path(row)}
        return SourceKind(_band(_told(band, row)), told, tuple(sorted(others)))

    for name, own in named.items():
        _grade("a measure's name", name)
        if not callable(own):
            _grade(name, own)
    if not callable(band):
        _band(band)
    if not callable(also):
        _classes(also)
    return dataclasses.replace(rows, kind_of=kind_of)


def of_field(name: str, read: Callable[[Any], Any] = lambda value: value) -> OfRow:
    """Return a function that takes what was measured from one of a row's columns.

    Args:
        name: the column; it must be one of the rows' columns.
        read: makes a band or a grade of its value; raises ValueError where it can't.
    """

    def of_row(row: Mapping[str, Any]) -> Any:  # noqa: ANN401  (what `read` makes of it)
        if name not in row:
            raise DataError(f"lacks {name!r}, which says what was measured of it: there is {', '.join(row)}")
        try:
            return read(row[name])
        except ValueError as error:
            raise DataError(f"field {name!r}: {str(error).rstrip('.')}") from error

    return of_row


def kinds_in(rows: Rows) -> list[tuple[str, SourceKind]]:
    """Return each class of rows with each kind that it has, in order; all rows are read once.

    Raises:
        DataError: a row is bad, where that ends the pass; or they have more kinds than shards can be kept apart for.
    """
    found: set[tuple[str, SourceKind]] = set()
    for row in rows:
        found.add((rows.class_path(row), rows.kind(row)))
        if len(found) > MAX_KINDS:
            some = "; ".join(str(kind) or path for path, kind in sorted(found)[:3])
            raise DataError(
                f"The rows are of more than {MAX_KINDS} kinds ({some}; ...), and each has shards of its own. Measure "
                "by fewer grades: a number wants thresholds."
            )
    return sorted(found)


def _told(said: Any, row: Mapping[str, Any]) -> Any:  # noqa: ANN401  (a value, or what a function gives)
    if not callable(said):
        return said
    try:
        return said(row)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from error


def _band(band: object) -> int:
    if not isinstance(band, int) or isinstance(band, bool) or band < 0:
        raise DataError(f"its band is {band!r:.60}, and a band is a number from 0: give `Bands.band_of` of a value")
    return band


def _grade(name: str, grade: object) -> str:
    if not isinstance(grade, str) or not _WORD.fullmatch(grade):
        what = "a word of [A-Za-z0-9_-] that begins with a letter; a number wants the thresholds of a policy"
        raise DataError(f"{name} is {grade!r:.60}, and isn't {what}")
    return grade


def _classes(also: object) -> list[str]:
    names = [also] if isinstance(also, str) else also
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"it's also {also!r:.60}, and that's no class, nor a list of classes")
    for name in names:
        check_class_path(name)
    return list(names)
