"""The lines of a run's files: those that came since the last look, and whole curves, thinned."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from cosmati.storage.duck import connection, quoted
from cosmati.store.compact import is_current
from cosmati.store.parquet import exactly, pointer, read_lines
from cosmati.store.scan import is_plain

MAX_BYTES = 1 << 20
_LONGEST_BEFORE = 1 << 16
_MARKED = 1 << 12
Thinning = Literal["extremes", "mean"]
T = TypeVar("T", int, float)


def lines_after(path: Path, offset: int = 0, *, max_bytes: int = MAX_BYTES) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines after a place in a file of JSON lines, and the place to go on from.

    A last line that isn't finished is left for later, and a damaged one is left out. A run that is resumed cuts its
    files back to the step that it goes on from: where `offset` is no end of a line any more, lines come from the
    start. Steps only grow in a file, so whoever holds earlier lines drops those from the first returned step on.

    Args:
        path: of the file, which may not be there yet.
        offset: in bytes; 0 at first, and then what the last call returned.
        max_bytes: read at most, so that the lines of a long file come in several calls; a longer line is left out.
    """
    try:
        if not is_plain(path):
            return [], 0
        with path.open("rb") as file:
            if offset > 0:
                file.seek(offset - 1)
                if file.read(1) != b"\n":
                    offset = 0
            file.seek(max(offset, 0))
            data = file.read(max_bytes)
    except OSError:
        return [], 0
    whole, newline, _ = data.rpartition(b"\n")
    if not newline and len(data) == max_bytes:
        return [], _end_of_line(path, offset + max_bytes)
    found = []
    for line in whole.split(b"\n"):
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found, max(offset, 0) + len(whole) + len(newline)


@dataclass(frozen=True)
class FilePlace:
    """A place in a file: a mark of the file (a resume replaces it by a shorter one), and the bytes read of it."""

    file: int = 0
    offset: int = 0


def lines_since(path: Path, place: FilePlace) -> tuple[list[dict[str, Any]], FilePlace, bool]:
    """Return the whole lines after a place, the place to go on from, and whether the file was begun anew since.

    Where it was, its lines come from the start, and those of before don't count any more.
    """
    try:
        state = path.stat()
    except OSError:
        state = None
    if state is None or not is_plain(path):
        return [], FilePlace(), place.offset > 0
    is_anew = place.offset > 0 and _mark(path, state.st_ino, place.offset) != place.file
    # Should it be replaced right here, the next look finds another file than this one, and starts anew.
    lines, offset = lines_after(path, 0 if is_anew else place.offset)
    return lines, FilePlace(_mark(path, state.st_ino, offset), offset), is_anew


def _mark(path: Path, inode: int, offset: int) -> int:
    """Return a mark of a file and of what stands before a place in it: a file's number may go to its successor's."""
    return zlib.crc32(_before(path, offset, _MARKED), inode & 0xFFFFFFFF)


def _before(path: Path, offset: int, most: int) -> bytes:
    """Return the bytes before a place in a file, at most so many."""
    try:
        with path.open("rb") as file:
            start = max(0, offset - most)
            file.seek(start)
            return file.read(offset - start)
    except OSError:
        return b""


def line_before(path: Path, offset: int) -> dict[str, Any]:
    """Return the whole line that ends at a place in a file, empty where none does."""
    data = _before(path, offset, _LONGEST_BEFORE)
    if not data.endswith(b"\n"):
        return {}
    try:
        value = msgspec.json.decode(data[:-1].rpartition(b"\n")[2])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def extremes(steps: Sequence[T], values: Sequence[float], max_points: int) -> tuple[list[T], list[float]]:
    """Return at most so many points: first and last, and between them each window's lowest and highest, in order."""
    num = len(steps)
    if num <= max_points:
        return list(steps), list(values)
    num_windows = max(1, max_points // 2 - 1)
    kept = {0, num - 1}
    for window in range(num_windows):
        places = range(1 + window * (num - 2) // num_windows, 1 + (window + 1) * (num - 2) // num_windows)
        if places:
            kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    chosen = sorted(kept)
    return [steps[place] for place in chosen], [values[place] for place in chosen]


def _end_of_line(path: Path, offset: int) -> int:
    """Return where the line that is longer than anybody reads ends, or where it has come to."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(MAX_BYTES):
            place = data.find(b"\n")
            if place >= 0:
                return offset + place + 1
            offset += len(data)
    return offset


@dataclass(frozen=True)
class RunCurve:
    """A measure by steps, in their order.

    Attributes:
        steps: Optimizer steps.
        values: Of the measure, all finite.
        num_points: How many there were before they were thinned.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    num_points: int


def curve(
    path: Path, names: Sequence[str], max_points: int = 1000, *, thinning: Thinning = "extremes"
) -> dict[str, RunCurve]:
    """Return measures of a file of JSON lines, or of its Parquet copy where that is up to date, thinned.

    Args:
        path: of the `.jsonl` file, which may be missing.
        names: of the measures; one that the file hasn't has no points.
        max_points: of each measure, at least 4.
        thinning: what stays of each of equally many points that follow one another: the lowest and the highest, so
            that no peak is lost, or the mean, at the middle step. The first and the last point stay in either case.

    Raises:
        MissingExtraError: DuckDB isn't installed.
    """
    copy = path.with_suffix(".parquet")
    is_copied = is_current(copy, path)
    found = dict.fromkeys(names, RunCurve((), (), 0))
    if not is_copied and not is_plain(path):
        return found
    with connection() as database:
        known: set[str] = set()
        if is_copied:
            rows = database.execute("SELECT name FROM parquet_schema(?)", [exactly(copy)]).fetchall()
            known = {row[0] for row in rows}
        for name in found:
            if is_copied:
                if not {"step", name} <= known:
                    continue
                source = f"SELECT {quoted('step')} AS f0, {quoted(name)} AS f1 FROM read_parquet(?)"
                values = [exactly(copy)]
            else:
                source, values = read_lines(2), [pointer("step"), pointer(name), exactly(path)]
            rows = database.execute(_thinned(source, thinning, max(max_points, 4)), values).fetchall()
            points = sorted(
                {(step, value) for row in rows for step, value in zip(row[:-1:2], row[1:-1:2], strict=True)}
            )
            if points:
                steps, numbers = zip(*points, strict=True)
                found[name] = RunCurve(steps, numbers, rows[0][-1])
    return found


def _thinned(source: str, thinning: Thinning, max_points: int) -> str:
    """Return the SQL of at most so many points; a row is steps and values in turn, and the number of all points."""
    if thinning == "extremes":
        num_buckets = max_points // 2 - 1
        picked = "arg_min(step, value), min(value), arg_max(step, value), max(value)"
    else:
        num_buckets = max_points - 2
        picked = "quantile_disc(step, 0.5), avg(value)"
    return f"""
        WITH points AS (
            SELECT *, row_number() OVER (ORDER BY step) - 1 AS place, count(*) OVER () AS num
            FROM (SELECT TRY_CAST(f0 AS BIGINT) AS step, TRY_CAST(f1 AS DOUBLE) AS value FROM ({source}))
            WHERE step IS NOT NULL AND isfinite(value)
        )
        SELECT {picked}, any_value(num) FROM points
        GROUP BY CASE
            WHEN num <= {max_points} OR place = 0 THEN place
            WHEN place = num - 1 THEN num + 1
            ELSE 1 + (place - 1) * {num_buckets} // (num - 2)
        END
    """
