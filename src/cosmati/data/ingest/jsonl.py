"""JSON Lines: one JSON object a line, checked against the columns that it's to fill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from cosmati.data.ingest.files import MAX_RECORD_BYTES, Paths, file_digests, list_files, read_records
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, Reading, Row, Rows
from cosmati.data.shards.exact_numbers import as_exact
from cosmati.errors import DataError

JSONL_SUFFIXES = tuple(
    f"{kind}{packed}" for kind in (".jsonl", ".ndjson") for packed in ("", ".gz", ".bz2", ".xz", ".zst")
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGERS = frozenset({"int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))})
_FLOATS = frozenset({"float16", "float32", "float64"})


def read_jsonl(
    paths: Paths,
    columns: Mapping[str, str] | None = None,
    *,
    class_of: str | ClassOf,
    on_error: OnError = "raise",
    max_row_bytes: int = MAX_RECORD_BYTES,
    strict: bool = False,
) -> Rows:
    """Read JSON Lines, plain or compressed (`.gz`, `.bz2`, `.xz`, `.zst`).

    A row is bad if its line isn't a JSON object in UTF-8, names a key twice, lacks a column, or holds what the
    column's encoding can't. Nothing is converted that would change it: no text to numbers, no fraction to an
    integer, no `NaN`. Blank lines are no rows.

    Args:
        paths: files, or directories with `.jsonl` and `.ndjson` files.
        columns: encoding of each field to keep: `str`, `json`, `int`, `int8` to `uint64`, `float16` to `float64`,
            `ndarray:dtype` and `ndarray:dtype:shape` (lists of numbers). Other fields are left out. None takes what
            the first row of the first file has (see `infer_columns`), and then a row with another field is bad.
        class_of: class path of all rows, or a function of a row (see `class_by_field`).
        on_error: `raise` at a bad row, or leave it out and `record` it in `Rows.skipped`.
        max_row_bytes: a longer line is bad.
        strict: a row with a field that's none of the columns is bad, too.

    Raises:
        DataError: there are no files, or a column has an encoding that JSON can't fill.
    """
    files = list_files(paths, JSONL_SUFFIXES)
    wanted = infer_columns(paths, max_row_bytes=max_row_bytes) if columns is None else dict(columns)
    for name, encoding in wanted.items():
        if not _is_supported(encoding):
            msg = f"Column {name!r}: a JSON value can't fill the encoding {encoding!r}. Use one that read_jsonl lists."
            raise DataError(msg)
        if name in ORIGIN_COLUMNS:
            raise DataError(
                f"Column {name!r} is taken by a row's origin. Rename the field, or leave it out of columns=."
            )

    def read(reading: Reading) -> Iterator[Row]:
        for name, file in files:
            records = read_records(name, file, reading, separator=b"\n", max_bytes=max_row_bytes)
            for line, record in records:
                if not record.strip():
                    continue
                try:
                    row = _row(_parse(record, line), wanted, strict=strict or columns is None)
                except ValueError as error:
                    reading.reject(name, line, str(error), error)
                    continue
                sha256 = hashlib.sha256(record).digest()
                yield row | {"origin_file": name, "origin_place": line, "origin_sha256": sha256}

    encodings = MappingProxyType(wanted | dict(ORIGIN_COLUMNS))
    return Rows(encodings, class_of, read, on_error, inputs=partial(file_digests, files))


def infer_columns(paths: Paths, *, max_row_bytes: int = MAX_RECORD_BYTES) -> dict[str, str]:
    """Return columns for the first row of the first file: `str`, `int` and `float64` where it has these, else `json`.

    Raises:
        DataError: there is no row, or the first one is bad.
    """
    name, file = list_files(paths, JSONL_SUFFIXES)[0]
    for line, record in read_records(name, file, Reading("raise"), separator=b"\n", max_bytes=max_row_bytes):
        if record.strip():
            try:
                fields = _parse(record, line)
            except ValueError as error:
                raise DataError(f"{name}, {line}: {error}. The columns can't be inferred; give columns=.") from error
            kinds = {str: "str", int: "int", float: "float64"}
            return {key: kinds.get(type(value), "json") for key, value in fields.items()}
    raise DataError(f"{name} has no row to infer the columns from. Give columns=.")


def _parse(record: bytes, line: int) -> dict[str, Any]:
    """Parse a line.

    Raises:
        ValueError: it isn't a JSON object in UTF-8.
    """
    if line == 1:
        record = record.removeprefix(_BYTE_ORDER_MARK)
    try:
        value = json.loads(record.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"isn't UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"isn't JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}, not an object")  # noqa: TRY004  (the row's fault)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"names {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which isn't JSON")


def _row(fields: Mapping[str, Any], columns: Mapping[str, str], *, strict: bool) -> Row:
    missing = [name for name in columns if name not in fields]
    if missing:
        raise ValueError(f"lacks {', '.join(map(repr, missing))}")
    if strict and len(fields) > len(columns):
        names = [name for name in fields if name not in columns]
        raise ValueError(f"has fields that the first row hasn't: {', '.join(names)}; give columns= to choose")
    row: Row = {}
    for name, encoding in columns.items():
        try:
            row[name] = _value(fields[name], encoding)
        except ValueError as error:
            raise ValueError(f"field {name!r} {error}") from error
    return row


def _is_supported(encoding: str) -> bool:
    kind, *rest = encoding.split(":")
    if kind != "ndarray":
        return encoding in _INTEGERS | _FLOATS | {"str", "json"}
    if len(rest) not in {1, 2} or rest[0] not in (_INTEGERS | _FLOATS) - {"int"}:
        return False
    return len(rest) == 1 or all(part.isdecimal() and int(part) > 0 for part in rest[1].split(","))


def _value(value: Any, encoding: str) -> Any:  # noqa: ANN401  (whatever JSON holds)
    """Return a JSON value as the encoding takes it.

    Raises:
        ValueError: it can't be kept exactly.
    """
    if encoding == "json":
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is a ValueError
        return value
    if encoding == "str":
        if not isinstance(value, str):
            raise ValueError(f"is {_short(value)}, not text")
        value.encode()
        return value
    if encoding.startswith("ndarray:"):
        return _array(value, encoding)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (encoding in _INTEGERS and not isinstance(value, int)):
        kind = "an integer" if encoding in _INTEGERS else "a number"
        raise ValueError(f"is {_short(value)}, not {kind}")
    low, high = _range("int64" if encoding == "int" else encoding)
    if not low <= value <= high:
        raise ValueError(f"is {_short(value)}, beyond {encoding}")
    if encoding in _FLOATS:
        _exact(value, encoding)
    return value


def _array(value: Any, encoding: str) -> np.ndarray[Any, Any]:  # noqa: ANN401  (whatever JSON holds)
    dtype, _, shape = encoding.removeprefix("ndarray:").partition(":")
    if not isinstance(value, list):
        raise ValueError(f"is {_short(value)}, not a list of numbers")  # noqa: TRY004  (the row's fault)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError("is a list of lists of different lengths") from error
    if array.size == 0:
        raise ValueError("is an empty list, which the format can't hold")
    if shape and array.shape != tuple(map(int, shape.split(","))):
        raise ValueError(f"has the shape {array.shape}, not ({shape})")
    if array.dtype.kind not in ("iu" if dtype in _INTEGERS else "iuf"):
        raise ValueError(f"isn't a list of numbers that {dtype} can hold")
    low, high = _range(dtype)
    if array.min() < low or array.max() > high:
        raise ValueError(f"holds numbers beyond {dtype}")
    return _exact(value, dtype) if dtype in _FLOATS else array.astype(dtype)


def _exact(value: Any, dtype: str) -> np.ndarray[Any, Any]:  # noqa: ANN401  (numbers, or lists of them)
    try:
        return as_exact(value, np.dtype(dtype))
    except ValueError as error:
        raise ValueError(f"isn't what {dtype} can hold: {error}") from error


def _range(dtype: str) -> tuple[float, float]:
    info = np.finfo(dtype) if dtype in _FLOATS else np.iinfo(dtype)
    return (float(info.min), float(info.max)) if dtype in _FLOATS else (int(info.min), int(info.max))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
