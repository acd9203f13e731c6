"""Parquet files, row by row, as other readers give them: to be measured, classed and written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from cosmati.data.ingest.arrow import convert_cell, kind_of_column, row_digest
from cosmati.data.ingest.files import Paths, file_digests, list_files
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, OriginFile, Reading, Row, Rows
from cosmati.data.shards.parquet import METADATA_KEY
from cosmati.errors import DataError, MissingExtraError

PARQUET_SUFFIXES = (".parquet",)
_BATCH_ROWS = 256


def read_parquet(
    paths: Paths, *, class_of: str | ClassOf, columns: Sequence[str] | None = None, on_error: OnError = "raise"
) -> Rows:
    """Read Parquet files of the same columns, in the order of their names.

    Values come as `read_hugging_face` gives them. `origin_place` is the row's number in its file, from 0, and
    `origin_sha256` is over the row's columns.

    Args:
        paths: files, or directories of them.
        class_of: class path of all rows, or a function of a row (see `class_by_field`).
        columns: those to keep; None means all.
        on_error: `raise` at a row with a null, an empty array or a value that JSON can't hold, or leave it out and
            `record` it in `Rows.skipped`.

    Raises:
        DataError: there are no files, one can't be read, they have different columns, or a column is of a type that
            no encoding holds.
        MissingExtraError: pyarrow isn't installed.
    """
    files = list_files(paths, PARQUET_SUFFIXES)
    first, kept = _alike(files, columns)
    kinds = {}
    for one in kept:
        found = kind_of_column(first.field(one).type)
        if found is None:
            msg = f"{files[0][0]}, column {one!r} is {first.field(one).type}, which no encoding holds."
            raise DataError(f"{msg} Cast it, or leave it out.")
        kinds[one] = found

    def read(reading: Reading) -> Iterator[Row]:
        for name, path in files:
            for place, cells in _cells(name, path, kept, reading):
                try:
                    row = {
                        column: convert_cell(column, cells[column], convert) for column, (_, convert) in kinds.items()
                    }
                    sha256 = row_digest(row)
                except ValueError as error:
                    reading.reject(name, place, str(error), error)
                    continue
                yield row | {"origin_file": name, "origin_place": place, "origin_sha256": sha256}
            digest = file_digests([(name, path)])[name]
            reading.files.append(OriginFile(name, path.stat().st_size, digest))

    encodings = MappingProxyType({column: encoding for column, (encoding, _) in kinds.items()} | dict(ORIGIN_COLUMNS))
    return Rows(encodings, class_of, read, on_error, inputs=partial(file_digests, files))


def _alike(files: Sequence[tuple[str, Path]], columns: Sequence[str] | None) -> tuple[Any, list[str]]:
    """Return the schema of the first file, and the names of the columns to read, which all files have alike.

    Raises:
        DataError: they don't, or the columns can't be read.
    """
    schemas = {name: _opened(path).schema_arrow for name, path in files}
    if own := [name for name, schema in schemas.items() if METADATA_KEY in (schema.metadata or {})]:
        raise DataError(
            f"{own[0]} was made of shards, and says itself of which class its rows are and what was measured of them. "
            "`cosmati data convert` makes shards of it again."
        )
    first = schemas[files[0][0]]
    kept = list(first.names) if columns is None else list(columns)
    if twice := sorted({one for one in first.names if first.names.count(one) > 1}):
        raise DataError(f"{files[0][0]} has the column {twice[0]!r} twice. Rename one of them.")
    if unknown := [one for one in kept if one not in first.names]:
        raise DataError(f"{files[0][0]} has no column {', '.join(unknown)}. It has {', '.join(first.names)}.")
    for name, schema in schemas.items():
        unlike = [one for one in kept if one not in schema.names or schema.field(one).type != first.field(one).type]
        if unlike or (columns is None and len(schema.names) > len(kept)):
            more = unlike or [one for one in schema.names if one not in kept]
            there = f"{files[0][0]} has {', '.join(first.names)}"
            raise DataError(
                f"{name} has other columns than {there}: {', '.join(more)}. Write it by itself, or name it."
            )
    if taken := [one for one in kept if one in ORIGIN_COLUMNS]:
        raise DataError(f"Column {taken[0]!r} is taken by a row's origin. Rename it, or leave it out of columns=.")
    return first, kept


def _parquet() -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError as error:
        msg = "Parquet needs pyarrow, which isn't installed. Run: pip install 'cosmati[streaming]'"
        raise MissingExtraError(msg) from error
    module: ModuleType = pyarrow.parquet
    return module


def _opened(path: Path) -> Any:  # noqa: ANN401  (optional package)
    try:
        return _parquet().ParquetFile(path)
    except (OSError, ValueError) as error:  # Arrow's own errors among them
        raise DataError(f"{path} can't be read as Parquet: {error}. Look at it, or leave it out.") from error


def _cells(name: str, path: Path, columns: Sequence[str], reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row's number and Arrow scalars."""
    place = 0
    try:
        # A name with a dot would be taken for a field within a column.
        chosen = None if any("." in name for name in columns) else list(columns)
        for batch in _opened(path).iter_batches(_BATCH_ROWS, columns=chosen):
            for index in range(batch.num_rows):
                yield place, {column: batch.column(column)[index] for column in columns}
                place += 1
    except (OSError, ValueError) as error:
        reason = f"the file is damaged at or after this row, and its rest isn't read ({error})"
        reading.reject(name, place, reason, error)
