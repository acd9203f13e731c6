"""Configurations whose settings have names: what is given without one is told by which."""

from __future__ import annotations

import inspect
from typing import Any, Self


class NamedSettings:
    """Base of frozen, keyword-only dataclasses.

    Raises:
        TypeError: a value without a name; the message has the call with names.
    """

    def __new__(cls, *values: Any, **settings: Any) -> Self:  # noqa: ANN401  (as the dataclass takes them)
        """Return a new one, still empty."""
        if values:
            signature = inspect.signature(cls.__init__)  # a class of the user's own may take some without names
            names = [name for name, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY]
            try:
                signature.bind(None, *values, **settings)
            except TypeError:
                if len(values) <= len(names) == len(signature.parameters) - 1:
                    given = dict(zip(names, values, strict=False)) | settings
                    call = ", ".join(f"{name}={value!r}" for name, value in given.items())
                    msg = f"{cls.__name__} takes its settings by name: {cls.__name__}({call})."
                    raise TypeError(msg) from None
        return super().__new__(cls)
