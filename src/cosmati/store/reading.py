"""From a source's files to the summaries of its runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmati.errors import RunError
from cosmati.records.run import CLOCK_FIELDS, RUN_VERSION, training_seconds
from cosmati.records.study import STUDY_VERSION, StudyRecord
from cosmati.storage.lock import is_locked
from cosmati.store.scan import (
    LINES_FILE,
    PLANNED_FILE,
    RUN_FILE,
    STARTED_FILE,
    STUDY_FILE,
    StoreEntry,
    is_plain,
    plain_bytes,
)
from cosmati.store.summary import LARGEST_STEP, Fact, RunSummary, finite, key_of, points_up

_END_BYTES = 1 << 18
_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class EntryReading:
    """What a source says.

    Attributes:
        runs: Its runs.
        problem: What of it can't be read, empty where all can.
        name: Of a study, empty for a run.
        num_planned: How many runs a study that isn't finished will have, None for any other source.
    """

    runs: tuple[RunSummary, ...]
    problem: str = ""
    name: str = ""
    num_planned: int | None = None


# What the index takes of the records: msgspec reads and checks these at several times the records' own pace.


class _Final(msgspec.Struct):
    step: int
    seconds: float | str  # what isn't finite is written as a word
    quality: float | str
    rows: int = 0
    tokens: int = 0
    flops: float | str = 0.0


class _StudyRun(msgspec.Struct):
    arm: str
    budget: float
    seed: int
    run_id: str
    final: _Final
    error: str = ""


class _Line(msgspec.Struct):
    recipe: str
    run: _StudyRun


class _Arm(msgspec.Struct):
    name: str
    recipe_text: str
    methods: tuple[str, ...] = ()


class _Study(msgspec.Struct):
    version: int
    name: str
    task: str
    quality_name: str
    higher_is_better: bool
    baseline_arm: str
    arms: tuple[_Arm, ...]
    runs: tuple[_StudyRun, ...]
    hardware: str
    price_per_hour: float | None


class _Planned(msgspec.Struct):
    recipes: dict[str, str]
    cells: list[tuple[str, float, int]]


class _PlanLine(msgspec.Struct):
    method: str


class _Run(msgspec.Struct):
    version: int
    run_id: str
    recipe_name: str
    recipe_text: str
    digests: dict[str, str]
    plan: tuple[_PlanLine, ...]
    seed: int
    num_steps: int
    hardware: str
    cost: float | str | None
    seconds_by_part: dict[str, float | str]
    outcome: str
    started: str
    ended: str | None
    metrics: dict[str, float | str]


def read_source(root: Path, source: StoreEntry) -> EntryReading:
    """Read one source; what is damaged, or of a release that this one doesn't know, is its problem."""
    folder = root / source.path
    if source.problem:
        return EntryReading((), source.problem)
    try:
        if source.kind == "run":
            return EntryReading((_run(folder, source.path),))
        return _study(folder, source.path)
    except RunError as error:
        return EntryReading((), str(error))
    except _ERRORS as error:
        problem = f"{folder} can't be read: {type(error).__name__}: {error}. Restore it from a copy."
        return EntryReading((), problem)


def _checked_version(kind: str, found: int, known: range) -> None:
    if found not in known:
        raise RunError(
            f"This {kind} has version {found}, and this release reads version {known[-1]}. "
            "Open it with the release of Cosmati that wrote it."
        )


def _run(folder: Path, path: str) -> RunSummary:
    record = msgspec.json.decode(plain_bytes(folder / RUN_FILE), type=_Run)
    _checked_version("RunRecord", record.version, range(RUN_VERSION, RUN_VERSION + 1))
    status = record.outcome
    if status == "running" and not is_locked(folder / "lock"):
        status = "broken off"
    step = last_line(folder / "steps.jsonl")
    last = {} if record.metrics else last_line(folder / "evaluations.jsonl")
    metrics = {name: finite(value) for name, value in (record.metrics or last).items() if name not in CLOCK_FIELDS}
    facts = flat(_json_or_text(record.recipe_text))
    quality_name = next(iter(metrics), "")
    trained = training_seconds({name: finite(value) or 0.0 for name, value in record.seconds_by_part.items()})
    return RunSummary(
        key=key_of(path),
        path=path,
        kind="run",
        name=record.run_id,
        arm=record.recipe_name,
        task=task if isinstance(task := facts.get("task"), str) and task else record.recipe_name,
        methods=tuple(line.method.partition("(")[0] for line in record.plan),
        hardware=record.hardware,
        seed=record.seed,
        status=status,
        started=record.started,
        ended=record.ended or "",
        steps=max(record.num_steps, _whole(step.get("step")) or 0, _whole(last.get("step")) or 0),
        rows=_whole(step.get("rows")) or _whole(last.get("rows")),
        tokens=_whole(last.get("tokens")),
        seconds=finite(trained) if trained else finite(last.get("seconds")),
        cost=finite(record.cost),
        quality_name=quality_name,
        higher_is_better=points_up(quality_name),
        quality=metrics.get(quality_name),
        is_governed=bool(record.digests.get("policy")),
        metrics=metrics,
        recipe=_digest(facts),
        facts=facts,
    )


def _study(folder: Path, path: str) -> EntryReading:
    started = folder / STARTED_FILE
    # Where both are there it was begun again since, or its end was cut short: the lines know all in any case.
    is_open = started.exists()
    record = msgspec.json.decode(plain_bytes(started if is_open else folder / STUDY_FILE), type=_Study)
    _checked_version("StudyRecord", record.version, range(1, STUDY_VERSION + 1))
    planned = _planned(folder) if is_open else None
    lines, num_damaged = _lines(folder / LINES_FILE, planned) if is_open else ([], 0)
    arms = {arm.name for arm in record.arms}
    going = [msgspec.convert(line["run"], _StudyRun) for line in lines]
    runs = [run for run in going if run.arm in arms] if is_open else list(record.runs)
    cells = {(run.arm, run.budget, run.seed) for run in runs}
    strangers = sorted({run.arm for run in runs} - arms)
    if strangers or len(cells) != len(runs) or len(arms) != len(record.arms):
        msg = (
            f"{folder} doesn't fit together: arms or runs stand in it twice, or its arms lack {strangers}. Restore it."
        )
        raise RunError(msg)
    found = tuple(_summaries(record, runs, path))
    num_planned = None if planned is None else len(planned.cells)
    damaged = f"{num_damaged} lines of {folder / LINES_FILE} are damaged, and left out. Restore it from a copy."
    return EntryReading(found, damaged if num_damaged else "", record.name, num_planned)


def _summaries(record: _Study, runs: list[_StudyRun], path: str) -> Iterator[RunSummary]:
    arms = {arm.name: arm for arm in record.arms}
    facts = {name: flat(_json_or_text(arm.recipe_text)) for name, arm in arms.items()}
    digests = {name: _digest(one) for name, one in facts.items()}
    for run in runs:
        arm, final = arms[run.arm], run.final
        quality, seconds, flops = finite(final.quality), finite(final.seconds), finite(final.flops)
        price = record.price_per_hour
        yield RunSummary(
            key=key_of(path, run.arm, run.budget, run.seed),
            path=path,
            kind="study",
            name=run.run_id,
            study=record.name,
            arm=arm.name,
            is_baseline=arm.name == record.baseline_arm,
            task=record.task,
            methods=arm.methods,
            hardware=record.hardware,
            budget=run.budget,
            seed=run.seed,
            status="failed" if run.error else "completed" if quality is not None else "diverged",
            steps=final.step,
            rows=final.rows or None,
            tokens=final.tokens or None,
            flops=flops or None,
            seconds=seconds,
            cost=None if price is None or seconds is None else finite(seconds / 3600 * price),
            quality_name=record.quality_name,
            higher_is_better=record.higher_is_better,
            quality=quality,
            recipe=digests[arm.name],
            facts=facts[arm.name],
        )


def study_record(folder: Path) -> StudyRecord:
    """Return a study's record; of one that isn't finished, with the runs that are.

    Raises:
        RunError: it's damaged, of another release, or no study.
    """
    started = folder / STARTED_FILE
    try:
        if not started.exists():
            return StudyRecord.from_json(plain_bytes(folder / STUDY_FILE).decode())
        value = json.loads(plain_bytes(started))
        lines, _ = _lines(folder / LINES_FILE, _planned(folder))
        return StudyRecord.from_json(json.dumps({**value, "runs": [line["run"] for line in lines]}))
    except RunError:
        raise
    except _ERRORS as error:
        msg = f"{folder} holds no study that can be read: {type(error).__name__}: {error}. Restore it from a copy."
        raise RunError(msg) from error


def _planned(folder: Path) -> _Planned | None:
    try:
        return msgspec.json.decode(plain_bytes(folder / PLANNED_FILE), type=_Planned)
    except (OSError, msgspec.DecodeError):
        return None  # its runs are shown all the same


def _lines(path: Path, planned: _Planned | None) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that count, of a cell that was run again the last one, and how many are damaged."""
    whole = plain_bytes(path).rpartition(b"\n")[0] if path.exists() else b""  # the last line may be half written
    found, num_damaged = dict[tuple[str, float, int], dict[str, Any]](), 0
    cells = None if planned is None else set(planned.cells)
    for text in whole.split(b"\n") if whole else []:
        try:
            value = msgspec.json.decode(text)
            line = msgspec.convert(value, _Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            num_damaged += 1
            continue
        cell = (line.run.arm, line.run.budget, line.run.seed)
        if planned is None or (cells and cell in cells and planned.recipes.get(line.run.arm) == line.recipe):
            found[cell] = value
    return list(found.values()), num_damaged


def last_line(path: Path) -> dict[str, Any]:
    """Return the last whole line of a file of JSON lines, empty where there's none; only the file's end is read."""
    try:
        if not is_plain(path):
            return {}
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            lines = file.read().rpartition(b"\n")[0].split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def flat(value: object, name: str = "") -> dict[str, Fact]:
    """Return nested facts by dotted names; a list's entries are numbered."""
    if isinstance(value, Mapping):
        parts = [(_clean(str(key)), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(index), item) for index, item in enumerate(value)]
    elif isinstance(value, bool) or value is None:
        return {name or "recipe": value}
    else:
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return {name or "recipe": value if is_number else _clean(str(value))}  # type: ignore[dict-item]
    found: dict[str, Fact] = {}
    for key, item in parts:
        found |= flat(item, f"{name}.{key}" if name else key)
    return found


def _clean(text: str) -> str:
    """Return a text that can be written as UTF-8: JSON may hold halves of characters."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _digest(facts: Mapping[str, Fact]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _whole(value: object) -> int | None:
    number = finite(value)
    return int(number) if number is not None and abs(number) < LARGEST_STEP else None
