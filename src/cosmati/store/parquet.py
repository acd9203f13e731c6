"""Parquet files by DuckDB, in memory: written from rows, and read with names and paths that may hold anything."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cosmati.storage.atomic import draft_of, publish
from cosmati.storage.duck import connection, quoted, text

_LARGEST_LINE = 1 << 26
_LINES = f"read_ndjson_objects(?, ignore_errors = true, maximum_object_size = {_LARGEST_LINE})"


def pointer(name: str) -> str:
    """Return the JSON pointer (RFC 6901) of a name in an object."""
    return "/" + name.replace("~", "~0").replace("/", "~1")


def exactly(path: Path) -> str:
    """Return a pattern that only this path fits."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def read_lines(field_marks: int) -> str:
    """Return the SQL that reads so many fields of each line of a file of JSON lines, as text.

    Its parameters are the fields' pointers, and the path.
    """
    fields = ", ".join(f"json_extract_string(json, ?) AS f{place}" for place in range(field_marks))
    return f"SELECT {fields} FROM {_LINES}"


def write_parquet(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write rows as a Parquet file, whole or not at all.

    Args:
        path: of the file; one that is there is replaced.
        rows: in order; what a row lacks is null.
        columns: SQL types by name: `BIGINT`, `DOUBLE`, `VARCHAR` or `BOOLEAN`.
        metadata: kept in the file.

    Raises:
        MissingExtraError: DuckDB isn't installed.
    """
    names = list(columns)
    fields = ", ".join(f"CAST(f{place} AS {columns[name]}) AS {quoted(name)}" for place, name in enumerate(names))
    options = "FORMAT parquet, COMPRESSION zstd"
    if metadata:
        pairs = ", ".join(f"{name}: {text(value)}" for name, value in metadata.items())
        options += f", KV_METADATA {{{pairs}}}"
    draft = draft_of(path)
    with tempfile.TemporaryDirectory() as folder, connection() as database:
        lines = Path(folder) / "rows.jsonl"
        with lines.open("wb") as file:
            for row in rows:
                file.write(msgspec.json.encode({str(n): _spelt(row.get(name)) for n, name in enumerate(names)}) + b"\n")
        inner = read_lines(len(names))
        sql = f"COPY (SELECT {fields} FROM ({inner})) TO {text(str(draft))} ({options})"
        try:
            database.execute(sql, [*(f"/{n}" for n in range(len(names))), exactly(lines)])
            publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def _spelt(value: object) -> object:
    """Return a value as DuckDB casts it: JSON has no word for what isn't finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return a file's rows."""
    with connection() as database:
        found = database.execute("SELECT * FROM read_parquet(?)", [exactly(path)])
        names = [one[0] for one in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def metadata_of(path: Path) -> dict[str, str]:
    """Return what was kept in a file beside its rows."""
    with connection() as database:
        rows = database.execute("SELECT key, value FROM parquet_kv_metadata(?)", [exactly(path)]).fetchall()
    return {_text_of(key): _text_of(value) for key, value in rows}


def _text_of(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
