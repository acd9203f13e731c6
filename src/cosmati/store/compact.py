"""Parquet copies of finished runs' lines, beside them: what a page reads of a long run at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmati.storage.lock import is_locked
from cosmati.store.parquet import metadata_of, read_parquet, write_parquet
from cosmati.store.scan import RUN_FILE, find_sources, is_plain, plain_bytes

LINE_FILES = ("steps.jsonl", "evaluations.jsonl")
_SIZE = "bytes_of_lines"


@dataclass(frozen=True)
class Compacted:
    """A file of a run: the copy's size in bytes, 0 where there is none, and then why."""

    path: Path
    num_bytes: int
    refused: str = ""


def compact(root: Path) -> Iterator[Compacted]:
    """Write the Parquet copies that finished runs of a store lack, and yield each file.

    The lines stay: a run that is resumed appends to them, and they are what a copy is checked by. A copy counts as
    long as the lines have the size that it was made of. One that doesn't say exactly what the lines say isn't kept.

    Raises:
        MissingExtraError: DuckDB isn't installed.
    """
    for source in find_sources(root):
        folder = root / source.path
        if source.kind != "run" or source.problem or _is_open(folder):
            continue
        for name in LINE_FILES:
            path = folder / name
            copy = path.with_suffix(".parquet")
            if is_plain(path) and not is_current(copy, path):
                yield _copied(path, copy)


def _is_open(folder: Path) -> bool:
    try:
        outcome = msgspec.json.decode(plain_bytes(folder / RUN_FILE))["outcome"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return True
    return outcome == "running" or is_locked(folder / "lock")


def is_current(copy: Path, path: Path) -> bool:
    """Say whether a Parquet copy holds all that a file of lines does; the lines may be gone."""
    if not is_plain(copy):
        return False
    try:
        return not path.exists() or metadata_of(copy).get(_SIZE) == str(path.stat().st_size)
    except Exception as error:  # DuckDB's errors, which can't be named where it isn't imported
        if type(error).__module__.split(".")[0] in ("duckdb", "_duckdb"):
            return False  # damaged
        raise


def _copied(path: Path, copy: Path) -> Compacted:
    data = path.read_bytes()
    try:
        lines = [msgspec.json.decode(line) for line in data.split(b"\n") if line]
        columns = _columns(lines)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        return Compacted(path, 0, str(error))
    write_parquet(copy, lines, columns, metadata={_SIZE: str(len(data))})
    back = [{name: value for name, value in row.items() if value is not None} for row in read_parquet(copy)]
    if back != [{name: value for name, value in line.items() if value is not None} for line in lines]:
        copy.unlink()
        return Compacted(path, 0, "its copy would say something else")
    return Compacted(path, copy.stat().st_size)


def _columns(lines: Sequence[Any]) -> dict[str, str]:
    """Return the narrowest type that holds each name's values.

    Raises:
        ValueError: there's none, or names differ in their letters' case alone, which Parquet's readers mix up.
    """
    kinds: dict[str, set[type]] = {}
    for line in lines:
        if not isinstance(line, dict):
            msg = "a line is no object"
            raise ValueError(msg)  # noqa: TRY004  (the file's content, not an argument)
        for name, value in line.items():
            is_large = isinstance(value, int) and abs(value) >= 2**63
            kinds.setdefault(name, set()).add(complex if is_large else type(value))
    found = {}
    for name, kind in kinds.items():
        values = kind - {type(None)}
        if values <= {int}:
            found[name] = "BIGINT"
        elif values <= {int, float}:
            found[name] = "DOUBLE"
        elif values in ({str}, {bool}):
            found[name] = "VARCHAR" if values == {str} else "BOOLEAN"
        else:
            msg = f"{name!r:.80} is of several kinds"
            raise ValueError(msg)
    if not found or len({name.casefold() for name in found}) < len(found):
        raise ValueError("it has no columns" if not found else "names differ in case alone")
    return found
