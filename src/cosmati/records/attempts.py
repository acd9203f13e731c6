"""The attempts of a run: each start in its folder is one. The content of `attempts.jsonl` and `superseded.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmati.records.run import CLOCK_FIELDS

ATTEMPTS_FILE, SUPERSEDED_FILE = "attempts.jsonl", "superseded.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """One start of a run, up to its end or to where it was killed.

    Attributes:
        number: from 0.
        first_step: commits before it.
        started: seconds since 1970.
        first_seconds: seconds of training before it.
        last_step: commits at its end, None where it was killed or goes on.
        outcome: `completed`, `stopped`, `exhausted`, `diverged` or `failed`; empty where it was killed or goes on.
        reason: why it was stopped, where an observer asked for it.
    """

    number: int
    first_step: int
    started: float
    first_seconds: float = 0.0
    last_step: int | None = None
    outcome: str = ""
    reason: str = ""


def read_attempts(folder: Path) -> list[RunAttempt]:
    """Return the attempts of a run folder, in order; none where an earlier release wrote it. Odd lines are left out."""
    found: dict[int, RunAttempt] = {}
    for line in read_lines(folder / ATTEMPTS_FILE):
        try:
            number = int(line["attempt"])
            if "started" in line:
                found[number] = RunAttempt(
                    number=number,
                    first_step=int(line["first_step"]),
                    started=_finite(line["started"]),
                    first_seconds=_finite(line["first_seconds"]),
                )
            else:
                found[number] = dataclasses.replace(
                    found[number],
                    last_step=int(line["last_step"]),
                    outcome=str(line.get("outcome", "")),
                    reason=str(line.get("reason", "")),
                )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return [found[number] for number in sorted(found)]


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(number)
    return float(number)


def attempt_of(step: int, attempts: Sequence[RunAttempt]) -> int:
    """Return the number of the attempt that wrote what a folder has of a step: the last that began before it."""
    return max((one.number for one in attempts if one.first_step < step), default=0)


def superseded_from(folder: Path) -> dict[int, int]:
    """Return, by the number of each attempt of which something was taken anew, the step after which it was."""
    found: dict[int, int] = {}
    for line in read_lines(folder / SUPERSEDED_FILE):
        number, step = line.get("attempt"), line.get("from_step")
        if isinstance(number, int) and isinstance(step, int):
            found[number] = min(found.get(number, step), step)
    return found


def metrics_at(folder: Path, step: int) -> dict[str, float]:
    """Return what a run measured last after so many steps; nothing where it didn't. What isn't finite is NaN."""
    lines = [line for line in read_lines(folder / "evaluations.jsonl") if line.get("step") == step]
    found = lines[-1].items() if lines else ()
    return {name: math.nan if value is None else value for name, value in found if name not in CLOCK_FIELDS}


def append_lines(path: Path, *lines: Mapping[str, object]) -> None:
    """Append lines to a file of JSON objects; after a torn line, on a line of their own.

    Raises:
        OSError: the disk refuses.
    """
    if lines:
        with path.open("ab+") as file:
            file.seek(max(0, file.seek(0, 2) - 1))
            torn = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * torn + "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file of JSON objects; nothing where there is no file. A torn line is left out."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line
