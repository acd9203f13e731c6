"""One side of a comparison: everything that a run's folder, or its study's record, says of it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cosmati.errors import LedgerError, RunError
from cosmati.explorer.differences import NamedFacts
from cosmati.explorer.run_view import Points
from cosmati.ledger.query import VerifiedLedger
from cosmati.records.ledger import CheckpointEntry, EndEntry, ResumeEntry, StepEntry
from cosmati.records.run import CLOCK_FIELDS, RunRecord
from cosmati.records.study import StudyRecord
from cosmati.store.live import extremes
from cosmati.store.reading import flat
from cosmati.store.scan import is_plain, plain_bytes, what_is_not_plain
from cosmati.store.summary import RunSummary, finite, is_step

RECIPE, CODE, DATA, POLICY, SEED, PLAN, ENVIRONMENT = (
    "Recipe",
    "Code and model",
    "Data",
    "Policy",
    "Seed and budget",
    "Plan",
    "Environment",
)
_SEEDS, _NAMES = ("seed", "config.seed"), ("name", "config.name")
"""Facts of a recipe that stand elsewhere too, but for those of another tool's: there `name` may be the model's."""
TimedPoints = tuple[tuple[float, float | None], ...]
_LARGEST_STATE = 1 << 26
_MAX_FACTS = 5000
_MAX_POINTS = 4000


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run, for a comparison.

    Attributes:
        summary: As the index has it.
        facts: By kind, each by name: causes first.
        recipe_text: As it was recorded.
        curves: Steps and values by the measure's name.
        timed: Seconds of training and values, where they're known.
        losses: By step, as they were logged.
        weights: Digest of the weights by steps done, by what it's a digest of.
        notes: What couldn't be read.
    """

    summary: RunSummary
    facts: Mapping[str, NamedFacts]
    recipe_text: str
    curves: Mapping[str, Points]
    timed: Mapping[str, TimedPoints] = field(default_factory=dict)
    losses: Mapping[int, float | None] = field(default_factory=dict)
    weights: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def of_study(study: StudyRecord, summary: RunSummary) -> ComparedRun:
    """Return a run of a study.

    Raises:
        RunError: the study hasn't it any more.
    """
    wanted = (summary.arm, summary.budget, summary.seed)
    run = next((one for one in study.runs if (one.arm, one.budget, one.seed) == wanted), None)
    arm = next((one for one in study.arms if one.name == summary.arm), None)
    if run is None or arm is None:
        raise RunError(f"The study {study.name} has no run {summary.name} any more. Choose another one.")
    around = {"hardware": study.hardware} | ({"threads": str(run.num_threads)} if run.num_threads else {})
    facts: dict[str, NamedFacts] = {
        RECIPE: _recipe(summary, {*_SEEDS, *_labels(summary)}),
        CODE: {},
        DATA: {"task": study.task},
        POLICY: {},
        SEED: {"seed": str(run.seed), "share of the budget": f"{run.budget:g}"},
        PLAN: {"arm": arm.name, "adds to the baseline": ", ".join(arm.methods) or "nothing that was named"},
        ENVIRONMENT: around,
    }
    points = run.points or (run.final,)
    name, values = study.quality_name, [one.quality if math.isfinite(one.quality) else None for one in points]
    return ComparedRun(
        summary=summary,
        facts=facts,
        recipe_text=arm.recipe_text,
        curves={name: tuple((one.step, value) for one, value in zip(points, values, strict=True))},
        timed={name: tuple((one.seconds, value) for one, value in zip(points, values, strict=True))},
    )


def of_folder(folder: Path, summary: RunSummary) -> ComparedRun:
    """Return a run that has a folder of its own.

    Raises:
        RunError: its record can't be read.
    """
    path = folder / "run.json"
    try:
        record = RunRecord.from_json(plain_bytes(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} can't be read: {error}. It was moved or removed: choose another run.") from error
    identity = _identity(folder)
    digests = record.digests
    data = {"digest": digests.get("data", "")} | _named(identity, "data")
    policy = {"digest": digests.get("policy") or "none"} | _named(identity, "taxonomy")
    plan = {str(place): f"{line.stage}: {line.method}" for place, line in enumerate(record.plan, 1)}
    plan |= {"microbatches a step": str(record.num_microbatches)}
    plan |= {f"promise {one.name}": f"holds: {one.holds}, because {one.because}" for one in record.guarantees}
    plan |= {f"digest of {name}": digests.get(name, "") for name in ("plan", "model")}
    is_imported = "imported from" in record.environment
    # Another tool's run has a seed where its settings name one: the record has to have a number.
    named = [name for name in summary.facts if name.lower() in ("seed", "random_seed")]
    seeds = {name for name in named if _text(summary.facts[name]) == str(record.seed)}
    has_seed = not is_imported or bool(seeds)
    recipe = _recipe(summary, seeds if is_imported else {*_SEEDS, *_labels(summary), "policy"})
    length: dict[str, str] = {name: recipe.pop(name) for name in ("budget", "num_steps") if name in recipe}
    facts: dict[str, NamedFacts] = {
        RECIPE: recipe,
        CODE: {
            name: value
            for head in ("model", "loss", "groups", "method_options", "parent")
            for name, value in _named(identity, head).items()
        },
        DATA: {} if is_imported else data,
        POLICY: {} if is_imported else policy,
        SEED: ({"seed": str(record.seed)} if has_seed else {}) | length,
        PLAN: {} if is_imported else plan,
        ENVIRONMENT: ({"hardware": record.hardware} if record.hardware else {}) | dict(record.environment),
    }
    losses, curves, timed = _curves(folder)
    weights, notes = _weights(folder)
    return ComparedRun(
        summary=summary,
        facts={name: dict(list(found.items())[:_MAX_FACTS]) for name, found in facts.items()},
        recipe_text=record.recipe_text,
        curves=curves,
        timed=timed,
        losses=losses,
        weights=weights,
        notes=notes,
    )


def _recipe(summary: RunSummary, elsewhere: Collection[str]) -> dict[str, str]:
    """Return the recipe's facts but for those that stand in another group."""
    return {name: _text(value) for name, value in summary.facts.items() if name not in elsewhere}


def _labels(summary: RunSummary) -> set[str]:
    """Return which facts of a recipe repeat what the run or its arm is called."""
    return {name for name in _NAMES if summary.facts.get(name) in (summary.arm, summary.name)}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _named(identity: Mapping[str, str], head: str) -> dict[str, str]:
    return {name: value for name, value in identity.items() if name.partition(".")[0] == head}


def _identity(folder: Path) -> dict[str, str]:
    """Return what the newest checkpoint says of code, model and data; empty where there's none."""
    for checkpoint in sorted(folder.glob("checkpoints/step-*"), reverse=True):
        path = checkpoint / "state.json"
        try:
            if path.stat().st_size > _LARGEST_STATE:
                continue
            found = msgspec.json.decode(plain_bytes(path), type=dict[str, Any]).get("identity")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, dict):
            return {name: _text(value) for name, value in flat(found).items()}
    return {}


def _curves(folder: Path) -> tuple[dict[int, float | None], dict[str, Points], dict[str, TimedPoints]]:
    losses: dict[int, float | None] = {}
    curves: dict[str, dict[float, float | None]] = {}
    timed: dict[str, dict[float, float | None]] = {}
    for name in ("steps.jsonl", "evaluations.jsonl"):
        for line in _lines(folder / name):
            step = line["step"]
            if name == "steps.jsonl":
                losses[step] = finite(line.get("loss"))
            for measure, value in line.items():
                if measure not in CLOCK_FIELDS and (name != "steps.jsonl" or measure == "loss"):
                    curves.setdefault(measure, {})[step] = finite(value)
                    if (seconds := finite(line.get("seconds"))) is not None:
                        timed.setdefault(measure, {})[seconds] = finite(value)
    by_step = {name: _thinned(found) for name, found in curves.items()}
    return losses, by_step, {name: _thinned(found) for name, found in timed.items()}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines that have a step; the last one may be half written."""
    if not is_plain(path):
        return
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    line = msgspec.json.decode(text, type=dict[str, Any])
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                if is_step(line.get("step")) and text.endswith(b"\n"):
                    yield line
    except OSError:
        return


def _thinned(points: Mapping[float, float | None]) -> tuple[tuple[Any, float | None], ...]:
    """Return points in order; of very many, the lowest and highest of each window of those that are finite."""
    ordered = sorted(points.items())
    if len(ordered) <= _MAX_POINTS:
        return tuple(ordered)
    finite = [(place, value) for place, value in ordered if value is not None]
    return tuple(zip(*extremes([one[0] for one in finite], [one[1] for one in finite], _MAX_POINTS), strict=True))


_IN_PARTS = "roots of checkpoints in parts"


def _weights(folder: Path) -> tuple[dict[str, dict[int, str]], tuple[str, ...]]:
    """Return digests of the weights: those of a verified ledger, and of the checkpoints that are kept."""
    # What ranks have written in parts is in other files for each number of ranks, and has a root.
    found: dict[str, dict[int, str]] = {"checkpoints' weights": {}, _IN_PARTS: {}}
    for checkpoint in folder.glob("checkpoints/step-*"):
        try:
            index = checkpoint / "index.json"
            if index.exists():
                if index.stat().st_size <= _LARGEST_STATE:
                    told = msgspec.json.decode(plain_bytes(index), type=dict[str, Any])
                    found[_IN_PARTS][int(checkpoint.name[5:])] = str(told["parameter_root"])
                continue
            digests = msgspec.json.decode(plain_bytes(checkpoint / "digests.json"), type=dict[str, str])
            found["checkpoints' weights"][int(checkpoint.name[5:])] = digests["model.safetensors"]
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, ValueError):
            continue
    if not (folder / "ledger").is_dir():
        return found, ()
    if odd := what_is_not_plain(folder / "ledger"):
        return found, (f"The ledger of {folder.name} says nothing here: {odd} is a link or no plain file.",)
    try:
        found["signed digests of the parameters"] = _signed(VerifiedLedger(folder / "ledger"))
    except (LedgerError, OSError) as error:
        return found, (f"The ledger of {folder.name} says nothing here: {error}",)
    return found, ()


def _signed(ledger: VerifiedLedger) -> dict[int, str]:
    roots: dict[int, str] = {}
    for item in ledger.entries():
        entry = item.entry
        if isinstance(entry, StepEntry):
            if entry.parameter_root is not None:
                roots[entry.step + 1] = entry.parameter_root.hex()
        elif isinstance(entry, ResumeEntry):
            # What was run again counts as it came out then.
            roots = {step: root for step, root in roots.items() if step <= entry.from_step}
        elif isinstance(entry, CheckpointEntry | EndEntry):
            roots[entry.step] = entry.parameter_root.hex()
    return roots
