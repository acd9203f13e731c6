"""Give records of studies as older releases wrote them the fields that they couldn't have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cosmati.errors import RunError


def refuse_nameless_profile(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a profile of version 1, which could be of any recipes."""
    if value.get("version") == 1:
        msg = (
            "This profile is of version 1, which doesn't say of which recipes it is. Profile again: "
            "cosmati study profile FILE --output PROFILE"
        )
        raise RunError(msg)
    return value


def upgraded_study(value: dict[str, Any]) -> dict[str, Any]:
    """Give a record of an older version the fields that it couldn't have; any other is as it was."""
    if value.get("version") not in (1, 2, 3):
        return value
    found = dict(value) if value["version"] == 3 else _upgraded_to_3(value)
    found["arms"] = _each(found.get("arms"), lambda arm: {**arm, "search": _upgraded_search(arm.get("search"))})
    found["runs"] = _each(found.get("runs"), lambda run: {"error": "", **run})
    return {"evaluated_on": [], **found, "version": 4}


def _upgraded_to_3(value: dict[str, Any]) -> dict[str, Any]:
    found = dict(value)
    if value["version"] == 1:
        found = {"costs": [], "registration": None, **found}
        found["arms"] = _each(found.get("arms"), lambda arm: {"opponent": None, "source": "", "search": None, **arm})
    found["arms"] = _each(found.get("arms"), lambda arm: {**arm, "search": _with(arm.get("search"), by_hand=0)})
    found["registration"] = _with(found.get("registration"), num_tests=None)
    found["runs"] = _each(found.get("runs"), upgraded_run)
    found["costs"] = _each(found.get("costs"), upgraded_cost)
    return found


def _upgraded_search(search: object) -> object:
    if not isinstance(search, dict):
        return search
    return {"arm": "", "evaluated_on": [], **search, "trials": _each(search.get("trials"), upgraded_trial)}


def upgraded_trial(trial: dict[str, Any]) -> dict[str, Any]:
    """Give a trial as it was written before version 4 the field that it couldn't have."""
    return {"error": "", **trial}


def _with(value: object, **added: object) -> object:
    """Give an older record what it couldn't say; where there is none there's nothing to give."""
    return {**added, **value} if isinstance(value, dict) else value


def upgraded_run(run: dict[str, Any]) -> dict[str, Any]:
    """Give a run as it was written before version 4 the fields that it couldn't have."""
    points = _each(run.get("points"), _upgraded_point)
    final = _each([run.get("final")], _upgraded_point)[0]
    return {"num_threads": 0, "error": "", **run, "points": points, "final": final}


def upgraded_cost(cost: dict[str, Any]) -> dict[str, Any]:
    """Give a cost profile as it was written before version 3 the fields that it couldn't have."""
    return {"evaluation_seconds": 0.0, "evaluated_rows": 0, "num_threads": 0, **cost}


def _upgraded_point(point: dict[str, Any]) -> dict[str, Any]:
    return {"cpu_seconds": 0.0, **point}


def _each(values: Any, upgrade: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:  # noqa: ANN401
    """Upgrade the objects of a list; what isn't one is left to the decoder, which refuses it."""
    if not isinstance(values, list):
        return values
    return [upgrade(one) if isinstance(one, dict) else one for one in values]
