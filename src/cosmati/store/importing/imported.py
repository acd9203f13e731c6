"""A run of another tool, and the run folder that it becomes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cosmati.records.run import CLOCK_FIELDS, RunRecord
from cosmati.storage.atomic import replace_files
from cosmati.store.summary import LARGEST_STEP, points_up

_EVALUATION = re.compile(r"(^|[^a-z])(val|valid|validation|eval|test|dev)([^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """What another tool says of a run.

    Attributes:
        name: Of the run, as the tool has it; no two of one source have the same `identity`.
        identity: What tells it from the others of its source; its name if left out.
        recipe_name: What several runs have in common: an experiment, a folder.
        lines: By step: measures, and `seconds`, `rows`, `tokens` where they're known.
        metrics: Final ones, where there are no lines.
        params: The recipe, nested or flat.
        started: In seconds since 1970, None where it isn't known.
        ended: The same of its end.
        outcome: `completed`, `stopped` or `failed`.
        facts: What else is known of it, as text.
    """

    name: str
    identity: str = ""
    recipe_name: str
    lines: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    outcome: str = "completed"
    facts: Mapping[str, str] = field(default_factory=dict)


def measure_name(name: str) -> str:
    """Return what a measure is called in the lines of a run, where some names are those of the clock."""
    return f"{name} (logged)" if name in CLOCK_FIELDS else name


def merged(points: Iterable[tuple[int, str, float]]) -> dict[int, dict[str, float]]:
    """Return measures by step from single ones; of a measure that comes twice at a step, the later one."""
    found: dict[int, dict[str, float]] = {}
    for step, name, value in points:
        found.setdefault(step, {})[name] = value
    return dict(sorted(found.items()))


def write_imported(run: ImportedRun, tool: str, source: Path, to: Path) -> Path:
    """Write the run folder, its record last, and return it."""
    identity = f"{tool}\0{source.absolute()}\0{run.identity or run.name}"
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name)[:60].strip("-.") or "run"
    final = _final(run)
    seconds = max((line["seconds"] for line in run.lines.values() if "seconds" in line), default=None)
    if seconds is None and run.started is not None and run.ended is not None:
        seconds = run.ended - run.started
    seed = next((value for name, value in run.params.items() if name.lower() in ("seed", "random_seed")), 0)
    record = RunRecord(
        run_id=_text(run.name),
        recipe_name=_text(run.recipe_name),
        recipe_text=json.dumps(run.params, default=str),
        digests={},
        environment={"imported from": tool, "source": _text(str(source)), **run.facts},
        plan=(),
        guarantees=(),
        seed=int(seed) if re.fullmatch(r"\d{1,18}", str(seed)) else 0,
        num_microbatches=1,
        num_steps=max(run.lines, default=0),
        hardware=run.facts.get("hardware", ""),
        cost=None,
        seconds_by_part={} if seconds is None or seconds < 0 else {"other": seconds},
        outcome=run.outcome,
        started=_time(run.started),
        ended=_time(run.ended),
        metrics=final,
    )
    lines = [
        {"step": step, **{name: _finite(value) for name, value in line.items()}} for step, line in run.lines.items()
    ]
    folder = to / f"{readable}-{digest}"
    files = {"evaluations.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode()} if lines else {}
    replace_files(folder, {**files, "run.json": record.to_json().encode()})
    return folder


def _final(run: ImportedRun) -> dict[str, float]:
    """Return the last value of each measure; the first is the one that a page draws, so a validation's comes first."""
    found = dict(run.metrics)
    for line in run.lines.values():
        found |= {name: value for name, value in line.items() if name not in CLOCK_FIELDS}
    rank = {True: 0, False: 1, None: 2}
    names = sorted(found, key=lambda name: (rank[points_up(name)], not _EVALUATION.search(name)))
    return {_text(name): found[name] for name in names}


def _time(seconds: float | None) -> str:
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def number(value: object) -> float | None:
    """Return a number that a tool wrote as a number or as text, None for anything else; it may not be finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def whole(value: object) -> int | None:
    """Return a step, None for what is no whole number."""
    found = number(value)
    return int(found) if found is not None and abs(found) < LARGEST_STEP and found.is_integer() else None


def counted(num: int, one: str) -> str:
    """Return a number of things in words."""
    return f"{num:,} {one}" + ("" if num == 1 else "s")
