"""Turn frozen records into JSON text and back, strictly.

The decoder follows the type hints of the dataclass: a missing field, an unknown field, a repeated key or a
value of another type is refused with its path. JSON has no non-finite numbers, so these are written as the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` where the field is a float: a run that diverged stays in
the record.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from cosmati.errors import RunError

T = TypeVar("T")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_record(record: Any) -> str:
    """Return the JSON text of a frozen record, one indent a level, with a newline at the end."""
    return json.dumps(_encode(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def decode_record(
    kind: type[T], text: str, *, version: int, upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> T:
    """Read a record of class `kind` whose `version` field is `version`, or becomes it by `upgrade`.

    Raises:
        RunError: the text isn't JSON, has another version, or doesn't have exactly the record's fields and
        types.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise RunError(
            f"This is no {kind.__name__}: it isn't JSON ({error}). Restore the file from its run."
        ) from error
    if isinstance(value, dict):
        value = upgrade(value)
    found = value.get("version") if isinstance(value, dict) else None
    if isinstance(found, bool) or found != version:
        raise RunError(
            f"This {kind.__name__} has version {found!r}, and this release reads version {version}. "
            "Open it with the release of Cosmati that wrote it."
        )
    return typing.cast("T", _decode(kind, value, kind.__name__))


class FileRecord:
    """A frozen record that is a file of its own; its `version` defaults to the one that this release reads."""

    version: int

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return encode_record(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a record from JSON text; `from_json(to_json(x)) == x`. What `upgraded` knows is read too.

        Raises:
            RunError: not JSON, another version, or other fields or types than this version's.
        """
        return decode_record(cls, text, version=cls.version, upgrade=cls.upgraded)

    @staticmethod
    def upgraded(record: dict[str, Any], /) -> dict[str, Any]:
        """Return what an earlier release wrote as this one writes it."""
        return record


def encode_records(records: Sequence[Any]) -> str:
    """Return the JSON text of a list of frozen records."""
    return json.dumps(_encode(records), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def decode_records(kind: type[T], text: str) -> tuple[T, ...]:
    """Read a list of records of class `kind`, which have no version.

    Raises:
        RunError: the text isn't JSON, no list, or an entry doesn't have exactly the record's fields and types.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise RunError(f"This is no list of {kind.__name__}: it isn't JSON ({error}). Restore the file.") from error
    if not isinstance(value, list):
        raise _refuse(kind.__name__, "a list", value)
    return tuple(_decode(kind, item, f"{kind.__name__}[{index}]") for index, item in enumerate(value))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise RunError("The record repeats a key, so its meaning is open. Restore the file from its run.")
    return keys


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _refuse(path: str, expected: str, value: Any) -> RunError:
    return RunError(f"{path} must be {expected}, and is {value!r:.80}. Restore the file from its run.")


def _decode(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _refuse(path, "a list", value)
        return tuple(_decode(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _refuse(path, "an object", value)
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if kind is float:
        return _decode_float(value, path)
    if type(value) is not kind:
        raise _refuse(path, f"a value of type {kind.__name__}", value)
    return value


def _decode_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Read what may be None, or one of several scalars."""
    if types.NoneType in kinds:
        inner = next(kind for kind in kinds if kind is not types.NoneType)
        return None if value is None else _decode(inner, value, path)
    if type(value) not in kinds:
        raise _refuse(path, f"a value of type {' or '.join(kind.__name__ for kind in kinds)}", value)
    return value


def _decode_float(value: Any, path: str) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return float(value)
    raise _refuse(path, "a number", value)


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields; worked out once, for a study has thousands of them."""
    return typing.get_type_hints(kind)


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _refuse(path, "an object", value)
    hints = _hints_of(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if names != set(value):
        missing, unknown = sorted(names - set(value)), sorted(set(value) - names)
        raise RunError(
            f"{path} has missing fields {missing} and unknown fields {unknown}. "
            "Restore the file from its run, or open it with the release of Cosmati that wrote it."
        )
    return kind(**{name: _decode(hints[name], value[name], f"{path}.{name}") for name in value})
