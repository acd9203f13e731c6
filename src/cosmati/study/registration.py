"""Commit a study to its predictions before its first run."""

from __future__ import annotations

import hashlib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cosmati.errors import PlanError, RunError
from cosmati.records.encoding import decode_record, encode_record
from cosmati.records.study import Registration, SearchRecord
from cosmati.storage.atomic import replace_file
from cosmati.study.curves import Axis
from cosmati.study.definition import Study
from cosmati.study.lines import readable, writable

REGISTRATION_FILE = "registration.json"
_VERSION = 2
UNCOUNTED: tuple[Axis, ...] = ("flops",)
"""Axes along which a study's runs aren't counted: records made elsewhere may have them."""


@dataclass(frozen=True)
class _Registered:
    """The file: what was predicted, and everything that the runs depend on, by name."""

    version: int
    registration: Registration
    facts: Mapping[str, str]


def registered_in(folder: Path) -> Registration | None:
    """Return what a study registered in its folder, None where it didn't.

    Raises:
        RunError: the file was changed since.
    """
    path = folder / REGISTRATION_FILE
    return _read(path).registration if path.exists() else None


def register(study: Study, folder: Path, *, has_runs: bool) -> Registration | None:
    """Write what a study predicts to `registration.json` with its digest, before the first run.

    Args:
        study: with its predictions, if it has any.
        folder: of the study.
        has_runs: whether a run was finished in the folder.

    Raises:
        PlanError: a prediction names an arm or an axis that there isn't.
        RunError: there are runs, and the study or its predictions were others before them; or the file was changed.
    """
    check_predictions(study)
    path = folder / REGISTRATION_FILE
    found = _read(path) if path.exists() else None
    facts = _facts(study) if study.registration else {}
    if has_runs:
        before = found.facts if found else {}
        changed = sorted(name for name in {*before, *facts} if before.get(name) != facts.get(name))
        if changed:
            msg = (
                f"{folder} has runs, which were made for other predictions or another study: {', '.join(changed)} "
                f"{'differ' if len(changed) > 1 else 'differs'}. What is predicted afterwards isn't a prediction: "
                "take a new folder."
            )
            raise RunError(msg)
        return found.registration if found else None
    if study.registration is None:
        path.unlink(missing_ok=True)
        return None
    if found is None or found.facts != facts:
        found = _written(study, facts, path)
    return found.registration


def check_predictions(study: Study) -> None:
    """Refuse predictions that no run could show.

    Raises:
        PlanError: one names an arm or an axis that there isn't.
    """
    axes = typing.get_args(Axis)
    for one in study.registration.predictions if study.registration else ():
        if one.axis in UNCOUNTED:
            msg = f"{one} can't be judged: runs of a study count no {one.axis}. Predict along another axis."
            raise PlanError(msg)
        is_known = not {one.arm, one.opponent} - set(study.arms) and one.arm != one.opponent and one.axis in axes
        if not is_known or not 0 < one.at_least < math.inf:
            msg = (
                f"{one} doesn't fit: two of the arms {', '.join(study.arms)}, one of the axes {', '.join(axes)}, and a "
                "speed-up above 0."
            )
            raise PlanError(msg)


def _facts(study: Study) -> dict[str, str]:
    plan = study.registration
    assert plan is not None, "the caller has looked"
    facts: dict[str, object] = {
        "family": plan.family,
        "predictions": [asdict(one) for one in plan.predictions],
        "budgets": list(study.budgets),
        "seeds": list(study.seeds),
        "baseline": study.baseline,
        "quality": [study.quality, study.higher_is_better],
        "cost turns": [study.cost_turns, study.cost_budget],
    }
    if plan.num_tests is not None:
        facts["tests of the family"] = plan.num_tests
    for name, arm in study.arms.items():
        search = _without_seconds(arm.search) if arm.search else None
        facts |= {
            f"recipe of {name}": arm.recipe_text,
            f"search of {name}": search,
            f"opponent {name}": [arm.opponent, arm.source],
            f"seeds of {name}": arm.seed_offset,
        }
    # Recipes are long and predictions short: what a person wants to read stays in words.
    texts = {name: json.dumps(value, sort_keys=True) for name, value in facts.items()}
    return {name: text if len(text) <= 2000 else _sha256(text) for name, text in texts.items()}


def _without_seconds(search: SearchRecord) -> str:
    """Return a search's text without what differs where it's done once more, or what its runs don't depend on."""
    bare = replace(search, trials=tuple(replace(one, seconds=0.0) for one in search.trials))
    text = json.loads(encode_record(bare))
    for name in ("by_hand", "arm", "evaluated_on"):
        del text[name]
    for trial in text["trials"]:
        if not trial["error"]:  # an older release couldn't say, and its digests stay
            del trial["error"]
    return json.dumps(text, indent=1, ensure_ascii=False) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(registration: Registration, facts: Mapping[str, str]) -> str:
    said = asdict(replace(registration, digest=""))
    if registration.num_tests is None:  # an older release couldn't say, and its digests stay
        del said["num_tests"]
    return _sha256(json.dumps({"registration": said, "facts": dict(facts)}, sort_keys=True))


def _written(study: Study, facts: Mapping[str, str], path: Path) -> _Registered:
    plan = study.registration
    assert plan is not None, "the caller has looked"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    bare = Registration(plan.family, plan.predictions, date, "", plan.family_size)
    made = _Registered(_VERSION, replace(bare, digest=_digest(bare, facts)), facts)
    with writable(path):
        replace_file(path, encode_record(made).encode())
    return made


def _read(path: Path) -> _Registered:
    with readable(path):
        text = path.read_text()
    try:
        found = decode_record(_Registered, text, version=_VERSION, upgrade=_upgraded)
    except RunError as error:
        msg = f"{path} isn't what was registered: {error}"
        raise RunError(msg) from error
    if found.registration.digest != _digest(found.registration, found.facts):
        msg = f"{path} isn't what was registered: its digest doesn't match. Restore it, or take a new folder."
        raise RunError(msg)
    return found


def _upgraded(value: dict[str, Any]) -> dict[str, Any]:
    """Give a file of version 1 what it couldn't say."""
    if value.get("version") != 1 or not isinstance(value.get("registration"), dict):
        return value
    return {**value, "version": _VERSION, "registration": {"num_tests": None, **value["registration"]}}
