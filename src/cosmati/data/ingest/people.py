"""Who has labelled or rated a row, or which function has: fields that stay with it from its file to a run's ledger.

They are columns of text, or of numbers, by these names. JSON Lines and Hugging Face data sets may have such fields;
`attribute` says them of rows that don't, such as files and images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cosmati.data.ingest.rows import Reading, Row, Rows
from cosmati.errors import DataError

PEOPLE = ("annotator", "label_function", "rater")
"""The columns' names."""
Who = str | Callable[[Mapping[str, Any]], str]
"""An id for all rows, or a function of a row."""


def attribute(
    rows: Rows, *, annotator: Who | None = None, label_function: Who | None = None, rater: Who | None = None
) -> Rows:
    """Say who has labelled or rated rows: each field that is given becomes a column of text.

    A row is bad where a function fails with a DataError, or gives no text or an empty one.

    Args:
        rows: of a reader.
        annotator: id of the person who has labelled or written a row.
        label_function: id of the program that has labelled it.
        rater: id of who has judged it.

    Raises:
        DataError: rows have such a column already, or an id is empty.
    """
    named = zip(PEOPLE, (annotator, label_function, rater), strict=True)
    given: dict[str, Who] = {name: who for name, who in named if who is not None}
    for name, who in given.items():
        if name in rows.columns:
            raise DataError(f"Rows have a column {name!r} already: what a file says of a row stays. Leave {name}= out.")
        if not callable(who):
            _checked(name, who)

    def read(reading: Reading) -> Iterator[Row]:
        for row in rows.pass_over(reading):
            try:
                told = {name: _checked(name, who(row) if callable(who) else who) for name, who in given.items()}
            except DataError as error:
                reading.reject(row["origin_file"], row["origin_place"], str(error).rstrip("."), error)
                continue
            yield row | told

    columns = MappingProxyType(dict(rows.columns) | dict.fromkeys(given, "str"))
    return dataclasses.replace(rows, columns=columns, read=read)


def people_in(columns: Mapping[str, str]) -> list[str]:
    """Return the names of people's columns that rows have.

    Raises:
        DataError: one holds neither text nor whole numbers.
    """
    found = [name for name in PEOPLE if name in columns]
    for name in found:
        if columns[name] != "str" and not columns[name].startswith(("int", "uint")):
            msg = f"Column {name!r} is {columns[name]}, and an id is text or a whole number. Write it as such."
            raise DataError(msg)
    return found


def _checked(name: str, who: object) -> str:
    if not isinstance(who, str) or not who:
        raise DataError(
            f"{name} is {who!r:.60}, and isn't the id of anybody: give text, and leave out what isn't known."
        )
    return who
