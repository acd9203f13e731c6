"""All points of a run's curve as CSV: read line by line as they are sent, for a page holds far fewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from fastapi.responses import StreamingResponse

from cosmati.errors import RunError
from cosmati.explorer.figures import Figure, csv_text
from cosmati.explorer.run_view import BESIDE, PACE, RunView, line_of, pace_points
from cosmati.explorer.server.asked import address
from cosmati.explorer.server.parts import attachment
from cosmati.store.scan import is_plain
from cosmati.store.summary import finite

STEPS, EVALUATIONS = "steps", "evaluations"
_CHUNK = 2000
_LONGEST = 1 << 20
"""Bytes of a line; a longer one is none that a run wrote."""
_NAMES = {words: name for name, words in BESIDE.items()} | {"mean loss": "loss"}


def with_addresses(figures: dict[str, Figure], view: RunView, key: str) -> dict[str, Figure]:
    """Give each curve the address of its CSV, which then doesn't stand in the page."""
    measures = {"loss": (STEPS, "mean loss")}
    measures |= {f"metric-{place}": (EVALUATIONS, name) for place, name in enumerate(view.metrics)}
    measures |= {f"step-{place}": (STEPS, name) for place, name in enumerate(view.beside)}
    found = dict(figures)
    for name in measures.keys() & figures.keys():
        file, measure = measures[name]
        at = address(f"/runs/{key}/curve.csv", [("file", file), ("measure", measure)])
        found[name] = replace(figures[name], csv="", csv_address=at)
    return found


def curve_answer(folder: Path, file: str, measure: str) -> StreamingResponse:
    """Return one curve of a run as CSV, with all its points.

    Args:
        folder: of the run.
        file: `steps` or `evaluations`.
        measure: as the page calls it.

    Raises:
        RunError: there's no such file.
    """
    if file not in (STEPS, EVALUATIONS):
        raise RunError(f"A run has no file {file[:80]!r} of curves. Choose one of {STEPS}, {EVALUATIONS}.")
    points = _points(folder / f"{file}.jsonl", file, measure)
    header = csv_text(["step", measure], [])
    chunks = iter(lambda: list(islice(points, _CHUNK)), [])
    parts = chain([header], ("".join(map(_row, chunk)) for chunk in chunks))
    encoded = (part.encode("utf-8", "replace") for part in parts)
    return StreamingResponse(encoded, media_type="text/csv; charset=utf-8", headers=attachment(measure))


def _points(path: Path, file: str, measure: str) -> Iterator[tuple[int, float | None]]:
    lines = _lines(path)
    if file == STEPS and measure == PACE:
        yield from pace_points(lines)
        return
    name = _NAMES.get(measure, measure) if file == STEPS else measure
    for line in lines:
        if name in line or (file, name) == (STEPS, "loss"):
            step = line["step"]
            assert isinstance(step, int), "checked where the line was read"
            yield step, finite(line.get(name))


def _lines(path: Path) -> Iterator[dict[str, object]]:
    if not is_plain(path):
        return
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            while text := file.readline(_LONGEST):
                if (line := line_of(text)) is not None:
                    yield line
    except OSError:
        return  # it was moved away: what came is all that there is


def _row(point: tuple[int, float | None]) -> str:
    step, value = point
    return f"{step},{'' if value is None else value}\r\n"
