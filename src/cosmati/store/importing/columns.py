"""Runs in columns: a file a run, with its steps in one column and a measure in each other one."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmati.errors import RunError
from cosmati.store.importing.imported import ImportedRun, counted, measure_name, merged, number, whole

STEP_NAMES = ("step", "_step", "global_step", "iteration", "trainer/global_step")
_CLOCK = {"_runtime": "seconds", "_timestamp": "", "timestamp": "", "wall time": "", "epoch": ""}
"""What other tools call the time, and what they say besides that is no measure."""
_MOST_NAMED = 8
csv.field_size_limit(1 << 26)


def csv_runs(source: Path, note: Callable[[str], None]) -> Iterator[ImportedRun]:
    """Yield the run of a CSV file, or of each one below a folder."""
    for path in [source] if source.is_file() else sorted(one for one in source.rglob("*.csv") if one.is_file()):
        name = str(path.relative_to(source).with_suffix("")) if source.is_dir() else path.stem
        try:
            lines = lines_of(read_csv(path, note), str(path), note, clocks=("seconds", "rows", "tokens"))
        except RunError as error:
            note(str(error))
            continue
        yield ImportedRun(name=name, recipe_name=path.parent.name or path.stem, lines=lines)


def read_csv(path: Path, note: Callable[[str], None]) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header; fields are parted by comma, semicolon or tab.

    Args:
        path: of the file.
        note: is told of rows with more fields than the header has names.

    Raises:
        RunError: it isn't such a file.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            delimiter = next((one for one in ",;\t" if one in header), ",")
            rows = list(csv.DictReader(file, delimiter=delimiter, restval=""))
    except (UnicodeDecodeError, csv.Error) as error:
        msg = f"{path} is no CSV of text: {error}. Export it again as UTF-8."
        raise RunError(msg) from error
    if num := sum(None in row for row in rows):
        note(f"{counted(num, 'row')} of {path} have more fields than the header: the last ones are left out.")
    return [{str(name): value for name, value in row.items() if name is not None} for row in rows]


def lines_of(
    rows: Iterable[Mapping[str, Any]], where: str, note: Callable[[str], None], *, clocks: Collection[str] = ()
) -> dict[int, dict[str, float]]:
    """Return measures by step from rows with a column of steps.

    Args:
        rows: by names of columns.
        where: they stand, for what is said of them.
        note: is told how much is left out: rows without a step, and values that are no numbers.
        clocks: columns that say time, rows or tokens and are no measures.

    Raises:
        RunError: no column says the step.
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    step_name = next((name for wanted in STEP_NAMES for name in names if name.lower() == wanted), None)
    if step_name is None:
        msg = f"{where} has no column {' or '.join(STEP_NAMES[:3])}, so nobody knows when its values were measured."
        raise RunError(msg)
    kept = {name: _CLOCK.get(name.lower(), name if name in clocks else measure_name(name)) for name in names}
    kept = {name: to for name, to in kept.items() if name != step_name and to and not to.startswith("_")}
    points, odd, odd_rows = list[tuple[int, str, float]](), dict[str, list[object]](), list[object]()
    for row in rows:
        if (step := whole(row.get(step_name))) is None:
            odd_rows.append(row.get(step_name))
            continue
        for name, value in row.items():
            if name in kept and value is not None and value != "":
                if (known := number(value)) is not None:
                    points.append((step, kept[name], known))
                else:
                    odd.setdefault(name, []).append(value)
    if odd_rows:
        first = f"the first {step_name} is {odd_rows[0]!r:.40}, no whole number"
        note(f"{counted(len(odd_rows), 'row')} of {where} without a step left out: {first}.")
    if odd:
        named = [
            f"{counted(len(all_), 'value')} of {name:.40}, the first {all_[0]!r:.40}" for name, all_ in odd.items()
        ]
        more = f"; and of {len(named) - _MOST_NAMED} more columns" if len(named) > _MOST_NAMED else ""
        note(f"No numbers, and left out of {where}: {'; '.join(named[:_MOST_NAMED])}{more}.")
    return merged(points)
