"""What tables say of those who vouch for the data: it agrees with what they commit to, and only ever grows tighter.

An amendment's details hold `withdrawn` from the first withdrawal on (`cosmati.records.ledger`). What is rejected stays
so, and the policy of every later table says it too; a stop is lifted by an amendment that says it no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from cosmati.records.foreign_json import read_foreign_json
from cosmati.records.joint_classes import ids_with, members_of


class Taken(NamedTuple):
    """One withdrawal: the target, its class, what is done, from which step on; and of what, where it's no data."""

    target: str
    class_name: str
    action: str
    step: int
    of: str = ""


def read_withdrawals(details: Mapping[str, Any]) -> tuple[Taken, ...]:
    """Return what a table's details say.

    Raises:
        ValueError: they don't follow the contract.
    """
    told = details.get("withdrawn")
    if told is None:
        return ()
    in_force = told.get("in_force") if isinstance(told, dict) else None
    if not isinstance(in_force, list) or not in_force or not all(map(_is_withdrawal, in_force)):
        msg = "what was withdrawn isn't a list of target, class, action and step"
        raise ValueError(msg)
    return tuple(Taken(one["target"], one["class"], one["action"], one["step"], one.get("of", "")) for one in in_force)


def _is_withdrawal(one: object) -> bool:
    return (
        isinstance(one, dict)
        and all(isinstance(one.get(name), str) for name in ("target", "class", "reason", "because"))
        and all(isinstance(one.get(name, ""), str) for name in ("of", "root", "deletion"))
        and one.get("action") in (("stop", "skip") if one.get("of") else ("stop", "reject"))
        and type(one.get("step")) is int
        and "/".join(one["target"].split("/")[1:-2]) == one["class"]
    )


def problem_with_data(details: Mapping[str, Any], committed: bytes | None) -> str:
    """Return where sources that were vouched for aren't those that an entry commits to as its data; empty for nowhere.

    Args:
        details: of the entry.
        committed: its commitment to the data.
    """
    text, told = details.get("data_text"), details.get("provenance")
    if not text or not isinstance(told, dict):
        return ""
    try:
        digest = hashlib.sha256(text.encode()).hexdigest()
        data = {str(index): name for index, name, *_ in read_foreign_json(text)[0]}
        vouched = {str(one["index_sha256"]): "/".join(one["target"].split("/")[1:-2]) for one in told["sources"]}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return f"what it says of its data can't be read: {error!r}"
    if hashlib.sha256(digest.encode()).digest() != committed:
        return "it commits to other data than it names"
    for index, name in vouched.items():
        if name not in members_of(str(data.get(index))):
            return f"the source of {name} with the index {index[:16]} was vouched for, and isn't among the data"
    if "withdrawn" not in details and (others := sorted({*data} - {*vouched})):
        return f"nobody has vouched for the data with the index {others[0][:16]}"
    return ""


def problem_with(
    now: tuple[Taken, ...],
    before: tuple[Taken, ...],
    classes: tuple[str, ...],
    phases: tuple[tuple[int, int], ...],
    decisions: tuple[tuple[str, ...], ...],
) -> str:
    """Return what doesn't hold of a table's withdrawals, empty where all does.

    Args:
        now: what it says.
        before: what the table before it said.
        classes: its class names.
        phases: first step and end of each phase of its policy; none without a policy.
        decisions: of its policy, by class and phase.
    """
    rejected = [one for one in now if one.action == "reject"]
    for one in before:
        if one.action == "reject" and not any(o.class_name == one.class_name and o.step <= one.step for o in rejected):
            return f"{one.class_name} was rejected from step {one.step} on, and isn't any more"
    skipped = {(one.of, one.target): one.step for one in now if one.action == "skip"}
    for one in before:
        if one.action == "skip" and skipped.get((one.of, one.target), one.step + 1) > one.step:
            return f"the {one.of} weren't to be read from step {one.step} on, and they are"
    for one in rejected:
        if not phases or one.class_name not in classes:
            return f"{one.class_name} is rejected, and there's no policy that says so"
        own = [decisions[index] for index in ids_with(classes, one.class_name)]
        for (start, end), decision in (pair for kinds in own for pair in zip(phases, kinds, strict=True)):
            if end > one.step and (start < one.step or decision != "reject"):
                return f"{one.class_name} is rejected from step {one.step} on, and its policy says {decision} there"
    return ""
