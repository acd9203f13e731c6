"""What figures of a plan may be: whatever is worked out from them is finite."""

from __future__ import annotations

from cosmati.errors import PlanError

LEAST, MOST = 1e-12, 1e12
"""Of figures that something is divided by, and of all: products and quotients of several still are numbers."""


def refuse_beyond(name: str, value: float, least: float = LEAST, most: float = MOST) -> None:
    """Refuse a figure that can't be.

    Args:
        name: of it.
        value: as it was given.
        least: that it may be.
        most: that it may be.

    Raises:
        PlanError: it's less or more, or no number.
    """
    if not least <= value <= most:
        raise PlanError(f"{name}={value:g} can't be: give a number from {least:g} to {most:g}.")


def refuse_parts(name: str, value: float) -> None:
    """Refuse a part of something that there are whole ones of.

    Args:
        name: of the figure.
        value: as it was given.

    Raises:
        PlanError: it's no whole number.
    """
    if value % 1 != 0:
        raise PlanError(f"{name}={value:g} can't be: give a whole number.")
