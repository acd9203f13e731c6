"""Configurations whose settings have names: what has none, or another tool's, is told which it is here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class NamedSettings:
    """Base of frozen, keyword-only dataclasses.

    Class attributes:
        other_names: what other tools call a setting, and its name here; or the words for it, with `{}` for the value
            and `{!r}` for its `repr`.

    Raises:
        TypeError: a value without a name, or an unknown name; the message has the call as it's written here.
    """

    other_names: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *values: Any, **settings: Any) -> Self:  # noqa: ANN401  (as the dataclass takes them)
        """Return a new one, still empty."""
        if values or not settings.keys() <= getattr(cls, "__dataclass_fields__", {}).keys():
            signature = inspect.signature(cls.__init__)  # a class of the user's own may take some without names
            names = [name for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY]
            try:
                signature.bind(None, *values, **settings)
            except TypeError:
                if len(values) <= len(names) == len(signature.parameters) - 1:
                    # What has to be given comes first, whatever a base class adds that has a default.
                    in_order = sorted(
                        names, key=lambda name: signature.parameters[name].default is not inspect.Parameter.empty
                    )
                    given = dict(zip(in_order, values, strict=False)) | settings
                    if unknown := [name for name in given if name not in names]:
                        raise TypeError(_unknown(cls, unknown[0], given[unknown[0]], names)) from None
                    call = ", ".join(f"{name}={value!r}" for name, value in given.items())
                    msg = f"{cls.__name__} takes its settings by name: {cls.__name__}({call})."
                    raise TypeError(msg) from None
        return super().__new__(cls)


class KnownNames:
    """Base of classes with a signature of their own, of which unknown arguments are told what they are here.

    Class attributes:
        other_names: as of `NamedSettings`.

    Raises:
        TypeError: an argument that isn't there.
    """

    other_names: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_: Any, **settings: Any) -> Self:  # noqa: ANN401  (as `__init__` takes them)
        """Return a new one, still empty."""
        parameters = inspect.signature(cls.__init__).parameters
        names = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)][1:]
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if not takes_any and (unknown := [name for name in settings if name not in names]):
            raise TypeError(_unknown(cls, unknown[0], settings[unknown[0]], names))
        return super().__new__(cls)


def _unknown(cls: type[NamedSettings | KnownNames], name: str, value: object, names: list[str]) -> str:
    """Say what a setting that isn't there is called, if anything is known of it."""
    other = cls.other_names.get(name, "")
    if other.partition("=")[0] not in names:
        near = difflib.get_close_matches(name, names, 1)
        other = near[0] if near else ""
    if not other:
        return f"{cls.__name__} has no {name!r}. It has {', '.join(names)}."
    here = other.replace("{!r}", repr(value)).replace("{}", str(value)) if "=" in other else f"{other}={value!r}"
    return f"{cls.__name__} has no {name!r}. Here it's {cls.__name__}({here})."
