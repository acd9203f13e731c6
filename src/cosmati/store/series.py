"""A run's measures by step, thinned: all of them, or those that came since the last look."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmati.records.run import CLOCK_FIELDS
from cosmati.store.live import MAX_BYTES, FilePlace, extremes, line_before, lines_since
from cosmati.store.summary import finite, is_step

MAX_POINTS = 2000
"""Of each measure that one answer holds: a few more than a wide screen has columns."""
MAX_MEASURES = 64
"""Of a file: a page of more is no page."""
ROWS_A_SECOND, TOKENS_A_SECOND = "rows per second", "tokens per second"
_PACES = (("rows", ROWS_A_SECOND), ("tokens", TOKENS_A_SECOND))


@dataclass
class _Measure:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class NewPoints:
    """What a file says after a place.

    Attributes:
        measures: Steps and values by the measure's name, in the order of steps, all finite.
        since: The first step that the lines are of, None where there's none. Points that somebody holds from this
            step on don't count any more: the run went on from before it.
        place: To go on from.
        is_anew: Whether the file was begun anew, so that nothing of before counts.
    """

    measures: Mapping[str, tuple[list[int], list[float]]]
    since: int | None
    place: FilePlace
    is_anew: bool


def new_points(path: Path, place: FilePlace, max_points: int = MAX_POINTS, *, has_pace: bool = False) -> NewPoints:
    """Return what a file of JSON lines says after a place, up to its last whole line.

    Args:
        path: of `steps.jsonl` or `evaluations.jsonl`, which may be missing.
        place: that the last answer gave; an empty one for all.
        max_points: of each measure; where there are more, each window's lowest and highest stay.
        has_pace: give rows, and tokens where there are any, a second of training between lines, too.
    """
    found = dict[str, _Measure]()
    since: int | None = None
    begun_anew = False
    before: Mapping[str, Any] | None = None
    while True:
        was = place
        lines, place, is_anew = lines_since(path, was)
        if is_anew:
            found, since, before, begun_anew = {}, None, None, True
        elif before is None and was.offset:
            before = line_before(path, was.offset)
        for line in lines:
            step = line.get("step")
            if not is_step(step):
                continue
            if since is None or step < since:
                since = step
            _add(found, step, line, before or {}, has_pace=has_pace)
            before = line
        if not lines and place.offset <= was.offset:
            break
        if place.offset - (0 if is_anew else was.offset) < MAX_BYTES // 2:
            break  # what is left is a line that isn't finished
    thin = {name: extremes(one.steps, one.values, max_points) for name, one in found.items() if one.steps}
    return NewPoints(thin, since, place, begun_anew)


def _add(
    found: dict[str, _Measure], step: int, line: Mapping[str, Any], before: Mapping[str, Any], *, has_pace: bool
) -> None:
    values = {name: value for name, value in line.items() if name not in CLOCK_FIELDS}
    # Rows that aren't sequences count as a token each: that says nothing more.
    paces = _PACES[: 1 if line.get("tokens") == line.get("rows") else 2] if has_pace else ()
    for amount, name in paces:
        pace = _pace(line, before, amount)
        if pace:
            values[name] = pace
    for name, value in values.items():
        if (number := finite(value)) is None:
            continue
        if name not in found and len(found) >= MAX_MEASURES:
            continue
        measure = found.setdefault(name, _Measure())
        while measure.steps and measure.steps[-1] >= step:  # it was resumed, and the file wasn't cut
            measure.steps.pop()
            measure.values.pop()
        measure.steps.append(step)
        measure.values.append(number)


def _pace(line: Mapping[str, Any], before: Mapping[str, Any], amount: str) -> float | None:
    try:
        seconds = line["seconds"] - before["seconds"]
        return float((line[amount] - before[amount]) / seconds) if seconds > 0 else None
    except (KeyError, TypeError, OverflowError):
        return None
