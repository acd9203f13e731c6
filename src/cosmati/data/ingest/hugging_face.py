"""From and to Hugging Face `datasets`, by way of Arrow: nothing is decoded or cast on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmati.data.ingest.arrow import Convert, convert_cell, filled_cell, kind_of_column, row_digest
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, OriginFile, Reading, Row, Rows
from cosmati.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_BATCH_ROWS = 256


def read_hugging_face(
    dataset: Dataset | IterableDataset,
    *,
    name: str,
    class_of: str | ClassOf,
    columns: Sequence[str] | None = None,
    on_error: OnError = "raise",
) -> Rows:
    """Read a Hugging Face data set, in its own order.

    Text, bytes and numbers come as they are, truth values as `uint8`, lists and arrays of numbers as numpy arrays,
    class labels as numbers with their names in `Rows.label_names`, images as the bytes that are stored; other
    lists, structures and `Json` as JSON. `origin_sha256` is over the row's columns (there is no record in a file),
    the same in whichever order they stand.

    Args:
        dataset: one split, as `datasets.load_dataset(..., split="train")` or `Dataset.from_file` return it.
        name: where it's from, such as `openai/gsm8k@<revision>, train`; stands in `origin_file`.
        class_of: class path of all rows, or a function of a row (see `class_by_field`).
        columns: those to keep; None means all.
        on_error: `raise` at a row with a null, an empty array or a value that JSON can't hold, or leave it out and
            `record` it in `Rows.skipped`.

    Raises:
        DataError: it isn't one split with features, or a column is of a type that no encoding holds.
        MissingExtraError: datasets isn't installed.
    """
    module = _datasets()
    features = getattr(dataset, "features", None)
    if not isinstance(dataset, module.Dataset | module.IterableDataset) or features is None:
        msg = (
            f"A {type(dataset).__name__} without features can't be read as rows. Name one split of a DatasetDict; "
            "give an IterableDataset its features with cast()."
        )
        raise DataError(msg)
    kept = list(features) if columns is None else list(columns)
    unknown = [column for column in kept if column not in features]
    if unknown:
        raise DataError(f"{name} has no column {', '.join(unknown)}. It has {', '.join(features)}.")
    taken = [column for column in kept if column in ORIGIN_COLUMNS]
    if taken:
        raise DataError(f"{name}: {', '.join(taken)} is taken by a row's origin. Rename the column, or leave it out.")
    kinds = {column: _kind(f"{name}, column {column!r}", features, column) for column in kept}
    source = dataset.select_columns(kept).with_format("arrow")

    def read(reading: Reading) -> Iterator[Row]:
        whole = hashlib.sha256()
        for place, cells in _cells(source, name, reading):
            try:
                row = {column: convert_cell(column, cells[column], convert) for column, (_, convert) in kinds.items()}
                sha256 = row_digest(row)
            except ValueError as error:
                reading.reject(name, place, str(error), error)
                continue
            whole.update(sha256)
            yield row | {"origin_file": name, "origin_place": place, "origin_sha256": sha256}
        reading.files.append(OriginFile(name, 0, whole.hexdigest()))

    labels = {c: tuple(features[c].names) for c in kept if isinstance(features[c], module.ClassLabel)}
    encodings = {column: encoding for column, (encoding, _) in kinds.items()}
    return Rows(MappingProxyType(encodings | dict(ORIGIN_COLUMNS)), class_of, read, on_error, label_names=labels)


def to_hugging_face(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    *,
    label_names: Mapping[str, Sequence[str]] | None = None,
    path: str | Path | None = None,
) -> Dataset:
    """Make a Hugging Face data set of rows.

    Numpy arrays become lists, or arrays where the encoding gives a shape; JSON becomes `Json`. Bytes stay bytes: for
    images, `cast_column(name, datasets.Image())` makes them decode.

    Args:
        rows: of a reader, of a streamed source, or any mappings; what isn't in `columns` is left out.
        columns: encoding of each; None takes those of `Rows`.
        label_names: columns that become class labels; None takes those of `Rows`.
        path: write this Arrow file batch by batch, and map it into memory; None keeps all rows in memory.

    Raises:
        DataError: a column is missing or doesn't fit its encoding, or has an encoding that has no counterpart.
        MissingExtraError: datasets isn't installed.
    """
    module = _datasets()
    import pyarrow as pa

    columns = columns if columns is not None else getattr(rows, "columns", None)
    label_names = label_names if label_names is not None else getattr(rows, "label_names", {})
    if columns is None:
        raise DataError("Plain rows don't say which columns they have. Give columns=, such as {'text': 'str'}.")
    iterator = iter(rows)
    first = list(islice(iterator, 1))
    features = module.Features(
        {name: _feature(module, name, encoding, first, label_names.get(name)) for name, encoding in columns.items()}
    )
    schema = features.arrow_schema
    tables = _tables(module, chain(first, iterator), features)
    if path is None:
        return module.Dataset(pa.concat_tables([schema.empty_table(), *tables]))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write_table(table)
    return module.Dataset.from_file(str(path))


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        msg = "Hugging Face data sets need datasets, which isn't installed. Run: pip install 'cosmati[llm]'"
        raise MissingExtraError(msg) from error
    module: ModuleType = datasets
    return module


# ---------------------------------------------------------------------------------------------------- from


def _cells(source: Any, name: str, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:  # noqa: ANN401  (optional package)
    """Yield each row's place and Arrow scalars."""
    import pyarrow as pa

    place = 0
    try:
        for table in source.iter(batch_size=_BATCH_ROWS):
            for index in range(table.num_rows):
                yield place, {column: table.column(column)[index] for column in table.column_names}
                place += 1
    except (OSError, pa.ArrowException) as error:
        reason = f"the data set is damaged at or after this row, and its rest isn't read ({error})"
        reading.reject(name, place, reason, error)


def _kind(where: str, features: Any, column: str) -> tuple[str, Convert]:  # noqa: ANN401  (optional package)
    """Return a column's encoding, and what takes its cells there."""
    import datasets

    arrow = features.arrow_schema.field(column).type
    if isinstance(features[column], datasets.Image):
        return "bytes", _image
    found = kind_of_column(arrow)
    if found is None:
        msg = f"{where} is of the type {features[column]}, which no encoding holds. Cast it, or leave it out."
        raise DataError(msg)
    return found


def _image(scalar: Any) -> bytes:  # noqa: ANN401  (an Arrow scalar)
    image = filled_cell(scalar)
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    try:
        return Path(image["path"] or "").read_bytes()
    except OSError as error:
        # A row that names no file is at fault itself.
        names_nothing = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        msg = f"holds no bytes, and its file can't be read ({error})"
        raise ValueError(msg) from (None if names_nothing else error)


# ------------------------------------------------------------------------------------------------------ to


def _feature(
    module: ModuleType, name: str, encoding: str, first: Sequence[Mapping[str, Any]], labels: Sequence[str] | None
) -> Any:  # noqa: ANN401  (optional package)
    """Return the feature of a column; arrays of a form that the encoding doesn't say take it from the first row."""
    plain = {"str": "string", "bytes": "binary", "int": "int64"}
    kind, *rest = encoding.split(":")
    if labels is not None:
        return module.ClassLabel(names=list(labels))
    if kind in plain or (kind != "ndarray" and kind.startswith(("int", "uint", "float"))):
        return module.Value(plain.get(kind, kind))
    if kind == "json" and hasattr(module, "Json"):
        return module.Json()
    if kind != "ndarray":
        raise DataError(f"Column {name!r}: the encoding {encoding!r} has no counterpart in this release of datasets.")
    example = np.asarray(first[0].get(name)) if first else np.empty(0, "int64")
    value = module.Value(rest[0] if rest else str(example.dtype))
    shape = tuple(map(int, rest[1].split(","))) if len(rest) > 1 else None
    if shape is not None and 2 <= len(shape) <= 5:
        return getattr(module, f"Array{len(shape)}D")(shape, value.dtype)
    feature = module.List(value, length=-1 if shape is None else shape[0])
    for _ in range(example.ndim - 1):
        feature = module.List(feature)
    return feature


def _tables(module: ModuleType, rows: Iterator[Mapping[str, Any]], features: Any) -> Iterator[Any]:  # noqa: ANN401  (optional package)
    import pyarrow as pa

    num_rows = 0
    while batch := list(islice(rows, _BATCH_ROWS)):
        try:
            values = {name: [row[name] for row in batch] for name in features}
            yield module.Dataset.from_dict(values, features=features).data.table
        except KeyError as error:
            msg = f"One of the rows {num_rows} to {num_rows + len(batch) - 1} has no column {error}."
            raise DataError(f"{msg} Name those that all have, in columns=.") from error
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            msg = f"One of the rows {num_rows} to {num_rows + len(batch) - 1} doesn't fit its columns: {error}"
            raise DataError(f"{msg}. Give columns= with encodings that do.") from error
        num_rows += len(batch)
