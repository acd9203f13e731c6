"""Arrow's columns and cells as the shards' encodings take them: nothing is cast on the way."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from cosmati.data.ingest.rows import Row

Convert = Callable[[Any], Any]
"""Takes an Arrow scalar; raises ValueError with the reason where the encoding can't hold it."""


def kind_of_column(arrow: Any) -> tuple[str, Convert] | None:  # noqa: ANN401  (optional package)
    """Return the encoding of a column of an Arrow type, and what takes its cells there; None where none holds it."""
    return _scalar_kind(arrow) or _array_kind(arrow) or _json_kind(arrow)


def _scalar_kind(arrow: Any) -> tuple[str, Convert] | None:  # noqa: ANN401  (optional package)
    from pyarrow import types

    if types.is_string(arrow) or types.is_large_string(arrow):
        return "str", filled_cell
    if types.is_binary(arrow) or types.is_large_binary(arrow):
        return "bytes", filled_cell
    if types.is_boolean(arrow):
        return "uint8", lambda scalar: int(filled_cell(scalar))
    return (_dtype(arrow), filled_cell) if _is_number(arrow) else None


def _array_kind(arrow: Any) -> tuple[str, Convert] | None:  # noqa: ANN401  (optional package)
    from pyarrow import types

    shape = getattr(arrow, "shape", None)
    if shape is not None:  # Array2D to Array5D
        inner = arrow.storage_type
        while _is_list(inner):
            inner = inner.value_type
        dtype = _dtype(inner)
        static = "" if None in shape else ":" + ",".join(map(str, shape))
        return f"ndarray:{dtype}{static}", lambda scalar: _filled(np.array(filled_cell(scalar), dtype))
    if _is_list(arrow) and (_is_number(arrow.value_type) or types.is_boolean(arrow.value_type)):
        dtype = _dtype(arrow.value_type)
        static = f":{arrow.list_size}" if types.is_fixed_size_list(arrow) else ""
        return f"ndarray:{dtype}{static}", lambda scalar: _list(scalar, dtype)
    return None


def _json_kind(arrow: Any) -> tuple[str, Convert] | None:  # noqa: ANN401  (optional package)
    if str(arrow) == "extension<arrow.json>":
        return "json", lambda scalar: None if scalar.as_py() is None else json.loads(scalar.as_py())
    return ("json", lambda scalar: scalar.as_py()) if _is_json(arrow) else None


def _dtype(arrow: Any) -> str:  # noqa: ANN401  (optional package)
    name = str(np.dtype(arrow.to_pandas_dtype()))
    return "uint8" if name == "bool" else name


def _is_number(arrow: Any) -> bool:  # noqa: ANN401  (optional package)
    from pyarrow import types

    return bool(types.is_integer(arrow) or types.is_floating(arrow))


def _is_list(arrow: Any) -> bool:  # noqa: ANN401  (optional package)
    from pyarrow import types

    return bool(types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow))


def _is_json(arrow: Any) -> bool:  # noqa: ANN401  (optional package)
    from pyarrow import types

    if _is_list(arrow):
        return _is_json(arrow.value_type)
    if types.is_struct(arrow):
        return all(_is_json(field.type) for field in arrow)
    known = (types.is_string, types.is_large_string, types.is_boolean, types.is_null, _is_number)
    return any(test(arrow) for test in known)


def convert_cell(column: str, scalar: Any, convert: Convert) -> Any:  # noqa: ANN401  (whatever the data set holds)
    """Return a cell as its column's encoding takes it.

    Raises:
        ValueError: it can't.
    """
    try:
        return convert(scalar)
    except ValueError as error:
        raise ValueError(f"column {column!r} {error}") from error


def filled_cell(scalar: Any) -> Any:  # noqa: ANN401  (an Arrow scalar)
    """Return a cell that isn't null.

    Raises:
        ValueError: it is.
    """
    value = scalar.as_py()
    if value is None:
        raise ValueError("is null, and its encoding has no null")
    return value


def _list(scalar: Any, dtype: str) -> np.ndarray[Any, Any]:  # noqa: ANN401  (an Arrow scalar)
    if not scalar.is_valid or scalar.values.null_count:
        raise ValueError("is or holds a null, and its encoding has no null")
    return _filled(scalar.values.to_numpy(zero_copy_only=False).astype(dtype))


def _filled(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.size == 0:
        raise ValueError("is an empty list, which the format can't hold")
    return array


def row_digest(row: Row) -> bytes:
    """Return SHA-256 over the columns sorted by name; each of name, type and value with its length before it."""
    found = hashlib.sha256()
    for name in sorted(row):
        for part in (name.encode(), *_canonical(row[name])):
            found.update(struct.pack("<Q", len(part)) + part)
    return found.digest()


def _canonical(value: Any) -> tuple[bytes, bytes]:  # noqa: ANN401  (whatever a row holds)
    if isinstance(value, bytes):
        return b"bytes", value
    if isinstance(value, str):
        return b"str", value.encode()
    if isinstance(value, float):
        return b"float", struct.pack("<d", value)
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return f"ndarray:{value.dtype.name}:{','.join(map(str, value.shape))}".encode(), little.tobytes()
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"json", text.encode()
