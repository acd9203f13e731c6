"""What the code of a function names, that of the functions within it included."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_read(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function's code names."""
    return {name for one in codes_in(code) for name in one.co_names}
