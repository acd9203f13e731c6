"""Classes of rows that belong to several at once: `licensed/news&personal/names`, the members in alphabetical order."""

from __future__ import annotations

from collections.abc import Iterable

_AND = "&"


def members_of(name: str) -> tuple[str, ...]:
    """Return the classes that rows of a class belong to: itself, or several."""
    return tuple(name.split(_AND))


def joint_name(names: Iterable[str]) -> str:
    """Return the name of the class of rows that belong to all of these; members may be joint themselves."""
    return _AND.join(sorted({member for name in names for member in members_of(name)}))


def is_joint(name: str) -> bool:
    """Return whether rows of the class belong to several."""
    return _AND in name


def ids_with(classes: Iterable[str], member: str) -> list[int]:
    """Return the indices of a class and of those that have it as a member."""
    return [index for index, name in enumerate(classes) if member in (name, *members_of(name))]
