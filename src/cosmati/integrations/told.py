"""What a run folder says of itself, as trackers are told it, and what they were told already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cosmati.errors import RunError
from cosmati.integrations.tracker import Config, TrackedRun, Tracker
from cosmati.records.attempts import append_lines, read_attempts, read_lines
from cosmati.records.run import RunRecord

TRACKED_FILE = "tracked.jsonl"


def run_of(folder: Path) -> tuple[RunRecord, TrackedRun]:
    """Return a run's record and the name under which trackers know it.

    Raises:
        RunError: the folder holds no run, or another release's.
    """
    try:
        record = RunRecord.from_json((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{folder} holds no run: run.json can't be read ({error}). Give the folder of one run."
        raise RunError(msg) from error
    attempts = read_attempts(folder)
    begun = repr(attempts[0].started) if attempts else record.started
    facts = json.dumps([record.seed, record.digests.get("model", ""), begun])
    starts = {one.number: one.started for one in attempts}
    return record, TrackedRun(record.run_id, hashlib.sha256(facts.encode()).hexdigest(), starts)


def config_of(record: RunRecord) -> Config:
    """Return what makes the run, by dotted names."""
    try:
        recipe = json.loads(record.recipe_text)
    except ValueError:
        recipe = record.recipe_text
    facts = dict(_flat(recipe, ""))
    facts |= {f"digest.{name}": value for name, value in record.digests.items() if value}
    facts |= {"recipe": record.recipe_name, "seed": record.seed, "microbatches": record.num_microbatches}
    facts |= {"hardware": record.hardware, "torch": record.environment.get("torch", "")}
    broken = [one.name for one in record.guarantees if not one.holds]
    return facts | {"guarantees.broken": ", ".join(broken)}


def _flat(value: object, name: str) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        parts = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list):
        parts = [(str(index), one) for index, one in enumerate(value)]
    else:
        plain = value if isinstance(value, bool | int | float | str) else str(value)
        return [(name or "recipe", plain)]
    return [item for key, one in parts for item in _flat(one, f"{name}.{key}" if name else key)]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a tracker was sent of an attempt.

    Attributes:
        last_step: up to here, by replays; None where the attempt was watched live.
        is_whole: whether that came to its end.
        superseded: from which step it was told to be superseded, None where it wasn't.
        outcome: that it was told; empty where it was watched live.
    """

    last_step: int | None
    is_whole: bool
    superseded: int | None = None
    outcome: str = ""


def sent_to(folder: Path, tracker: Tracker) -> dict[int, Sent]:
    """Return what a tracker was sent of a run, by attempt. Odd lines are left out."""
    found: dict[int, Sent] = {}
    for line in read_lines(folder / TRACKED_FILE):
        attempt = line.get("attempt")
        if (line.get("to"), line.get("where")) == (tracker.label, tracker.where) and isinstance(attempt, int):
            told: dict[str, Any] = {field.name: line[field.name] for field in fields(Sent) if field.name in line}
            steps = [told.get("last_step"), told.get("superseded")]
            if "last_step" in told and all(step is None or isinstance(step, int) for step in steps):
                found[attempt] = Sent(**{"is_whole": False, **told})
    return found


def note_sent(folder: Path, tracker: Tracker, attempt: int, sent: Sent) -> None:
    """Note what a tracker is about to be sent, or was."""
    with _refusals_named(folder / TRACKED_FILE) as path:
        append_lines(path, {"to": tracker.label, "where": tracker.where, "attempt": attempt, **asdict(sent)})


def try_to_note(folder: Path) -> None:
    """See whether notes can be written, before anything is sent."""
    with _refusals_named(folder / TRACKED_FILE) as path:
        path.open("a").close()


@contextmanager
def _refusals_named(path: Path) -> Iterator[Path]:
    try:
        yield path
    except OSError as error:
        msg = f"{path} can't be written ({error}), and without it nobody knows what was sent. Mend that."
        raise RunError(msg) from error
