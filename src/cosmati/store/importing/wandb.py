"""Runs that W&B exports: a history (CSV, JSON lines, Parquet), a chart's CSV, or a run's local folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cosmati.errors import RunError
from cosmati.store.importing.columns import lines_of, read_csv
from cosmati.store.importing.imported import ImportedRun, counted, measure_name, merged, number, whole
from cosmati.store.parquet import read_parquet

_HISTORIES = (".csv", ".jsonl", ".parquet")
_BETWEEN = " - "
"""Between the run's name and the measure's in the columns of a chart's CSV."""


def wandb_runs(source: Path, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    """Yield the runs of an export, or of all below a folder."""
    if source.is_file():
        yield from _of_file(source, source.stem, note)
        return
    with_history = set()
    for path in sorted(path for path in source.rglob("*") if path.suffix in _HISTORIES and path.is_file()):
        found = list(_of_file(path, str(path.relative_to(source).with_suffix("")), note))
        if found:  # a table that the run saved is no history of it
            with_history.add(path.parent)
        yield from found
    for path in sorted(source.rglob("wandb-summary.json")):
        if path.parent not in with_history:
            yield _of_summary(path)


def _of_file(path: Path, name: str, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    try:
        rows = _rows(path, note)
        if rows and "Step" in rows[0] and any(_BETWEEN in column for column in rows[0]):
            yield from _of_chart(path, rows)
            return
        lines = lines_of(rows, str(path), note)
    except RunError as error:
        note(str(error))
        return
    times = [time for row in rows if (time := number(row.get("_timestamp"))) is not None]
    yield ImportedRun(
        name=name,
        recipe_name=path.parent.name or path.stem,
        lines=lines,
        params=_params(path.parent),
        started=min(times, default=None),
        ended=max(times, default=None),
    )


def _rows(path: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return read_parquet(path)
    if path.suffix != ".jsonl":
        return read_csv(path, note)
    found, num_damaged = [], 0
    *lines, last = path.read_bytes().split(b"\n")
    for line in [*lines, last]:
        try:
            value = json.loads(line)  # not msgspec: W&B writes what isn't finite as bare words
        except (ValueError, RecursionError):
            # A last line may be half written by a run that was killed.
            num_damaged += bool(line.strip()) and line is not last
            continue
        if isinstance(value, dict):
            found.append(value)
    if num_damaged:
        note(f"{counted(num_damaged, 'line')} of {path} damaged, and left out.")
    return found


def _of_chart(path: Path, rows: list[dict[str, Any]]) -> Iterator[ImportedRun]:
    """Yield the runs of a chart: a column for each, and two more for the range that was smoothed over."""
    columns: dict[str, dict[str, str]] = {}
    for column in rows[0]:
        name, between, measure = column.rpartition(_BETWEEN)
        if between and not measure.endswith(("__MIN", "__MAX")) and not measure.startswith("_"):
            columns.setdefault(name, {})[column] = measure_name(measure)
    for name, measures in columns.items():
        points = (
            (step, measure, value)
            for row in rows
            if (step := whole(row["Step"])) is not None
            for column, measure in measures.items()
            if (value := number(row[column])) is not None
        )
        yield ImportedRun(name=name, recipe_name=path.stem, lines=merged(points))


def _of_summary(path: Path) -> ImportedRun:
    """Return a run of which the local folder holds the last values only; its history is in a binary file."""
    summary = _json(path)
    line = {name: value for name, text in summary.items() if (value := number(text)) is not None}
    seconds, ended = line.get("_runtime"), line.get("_timestamp")
    measures = {measure_name(name): value for name, value in line.items() if not name.startswith("_")}
    if seconds is not None:
        measures["seconds"] = seconds
    metadata = _json(path.with_name("wandb-metadata.json"))
    folder = path.parent.parent if path.parent.name == "files" else path.parent
    return ImportedRun(
        name=folder.name,
        identity=str(folder),
        recipe_name=str(metadata.get("program") or folder.parent.name),
        lines={whole(summary.get("_step")) or 0: measures},
        params=_params(path.parent),
        started=None if ended is None or seconds is None else ended - seconds,
        ended=ended,
        facts={name: str(metadata[name]) for name in ("python", "os", "gpu", "host") if metadata.get(name)},
    )


def _params(folder: Path) -> Mapping[str, Any]:
    """Return a run's configuration: `config.yaml` has each value beside a description."""
    if found := _json(folder / "config.json"):
        return found
    try:
        value = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    if not isinstance(value, dict):
        return {}
    items = {str(name): one for name, one in value.items() if name not in ("_wandb", "wandb_version")}
    return {name: one["value"] if isinstance(one, dict) and "value" in one else one for name, one in items.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
