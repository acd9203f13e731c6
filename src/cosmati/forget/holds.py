"""Legal holds: what may not be forgotten, because of what, since when. A hold stands until it's released.

They stand in the run's private folder, since they name rows, and go with it to its successors. Nothing is removed from
the file: a release is a line of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget, overlap
from cosmati.storage.atomic import replace_file

HOLDS = "holds.jsonl"


@dataclass(frozen=True)
class Hold:
    """A hold.

    Attributes:
        number: from 1.
        asked: what it's on.
        because: of what, in words.
        at: since when, ISO 8601.
        released: why it was released, and when; empty while it's in force.
    """

    number: int
    asked: ToForget
    because: str
    at: str
    released: str = ""

    def may_mean(self, asked: ToForget) -> bool:
        """Say whether it may be on something that is to be forgotten."""
        return overlap(self.asked, asked)


def hold(folder: Path, asked: ToForget, because: str) -> Hold:
    """Put a hold on classes or rows of a run.

    Raises:
        ForgetError: nobody says why, or the file is damaged.
    """
    lines = _lines(folder)
    number = 1 + sum(line["action"] == "hold" for line in lines)
    made = Hold(number, asked, _reason(because), _now())
    told = {"classes": list(asked.classes), "rows": sorted(asked.rows), "subject": asked.subject}
    _write(folder, [*lines, {"action": "hold", "number": number, **told, "because": made.because, "at": made.at}])
    return made


def release(folder: Path, number: int, because: str) -> None:
    """Release a hold.

    Raises:
        ForgetError: no such hold is in force, nobody says why, or the file is damaged.
    """
    numbers = [one.number for one in holds_in_force(folder)]
    if number not in numbers:
        msg = f"No hold {number} is in force. In force: {', '.join(map(str, numbers)) or 'none'}."
        raise ForgetError(msg)
    line = {"action": "release", "number": number, "because": _reason(because), "at": _now()}
    _write(folder, [*_lines(folder), line])


def all_holds(folder: Path) -> tuple[Hold, ...]:
    """Return the holds of a run, released ones too.

    Raises:
        ForgetError: the file is damaged: what nobody can read may be a hold.
    """
    released = {line["number"]: line for line in _lines(folder) if line["action"] == "release"}
    found = []
    for line in _lines(folder):
        if line["action"] == "hold":
            ended = released.get(line["number"])
            asked = ToForget(tuple(line["classes"]), frozenset(line["rows"]), line["subject"])
            why = f"{ended['because']} ({ended['at']})" if ended else ""
            found.append(Hold(line["number"], asked, line["because"], line["at"], why))
    return tuple(found)


def holds_in_force(folder: Path) -> tuple[Hold, ...]:
    """Return the holds that weren't released.

    Raises:
        ForgetError: the file is damaged.
    """
    return tuple(one for one in all_holds(folder) if not one.released)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "private" / HOLDS
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["action"] == "hold":
                ToForget(tuple(line["classes"]), frozenset(line["rows"]), line["subject"])
            assert isinstance(line["number"], int)
            assert isinstance(line["because"], str)
            assert isinstance(line["at"], str)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, ForgetError) as error:
        msg = f"{path} is damaged ({error!r}), and what stands there may be a hold. Restore it from a copy."
        raise ForgetError(msg) from error
    return lines


def _write(folder: Path, lines: list[dict[str, Any]]) -> None:
    path = folder / "private" / HOLDS
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _reason(because: str) -> str:
    if not because.strip():
        raise ForgetError("A hold is put on, and released, because of something. Say it: --because TEXT.")
    return because.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
