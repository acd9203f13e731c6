"""JSON that somebody else has written: what no file of ours says is a ValueError, whatever it is."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_MAX_DEPTH = 100


def read_foreign_json(data: bytes | str) -> Any:  # noqa: ANN401  (JSON)
    """Return what JSON says, all of which can be written down again.

    Raises:
        ValueError: it isn't JSON in UTF-8, is nested too deeply, or has a number that isn't finite or a text that isn't
            Unicode (half of a surrogate pair).
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it's nested too deeply") from error
    _check_depth(value)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # raises for half of a pair
    return value


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.40} is no finite number")


def _check_depth(value: object) -> None:
    """Refuse what could be read, and fails those who follow it by recursion."""
    nested = [value]
    for _ in range(_MAX_DEPTH):
        inside = (one.values() if isinstance(one, dict) else one for one in nested if isinstance(one, dict | list))
        nested = [one for own in inside for one in own]
        if not nested:
            return
    raise ValueError("it's nested too deeply")
