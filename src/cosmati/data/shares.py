"""What an epoch has of each class: repeats, rows chosen, the epoch's size, and the shares of a curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cosmati.data.order.interleave import Stretch
from cosmati.data.order.mixture import Group, whole_weights
from cosmati.errors import DataError


@dataclass(frozen=True)
class Span:
    """A span of a curriculum.

    Args:
        shares: parts of the classes, by class path, in any unit, exact however small; classes that aren't named have
            none.
        stop_rows: where it ends, in rows since the start; None for the last.
    """

    shares: Mapping[str, float | Fraction]
    stop_rows: int | None = None


def stretches(
    curriculum: Sequence[Span] | None, groups: Sequence[Group], classes: Sequence[str]
) -> tuple[Stretch, ...] | None:
    """Share each class's part of a span among its sources, by rows.

    Raises:
        DataError: a span names a class that the data don't have.
    """
    if curriculum is None:
        return None
    phases = []
    for span in curriculum:
        _check_classes("The curriculum", span.shares, classes)
        of_class = [_fraction(name, span.shares.get(name, 0)) for name in classes]
        rows = [sum(group.rows for group in groups if group.class_id == class_id) for class_id in range(len(classes))]
        shares = [of_class[g.class_id] * Fraction(g.rows, max(1, rows[g.class_id])) for g in groups]
        phases.append(Stretch(span.stop_rows, whole_weights(shares)))
    return tuple(phases)


def repeats_of(given: Mapping[str, float | Fraction], classes: Sequence[str]) -> dict[str, Fraction]:
    """Return how often an epoch visits each class.

    Raises:
        DataError: a class isn't there, or a number isn't one.
    """
    _check_classes("repeats=", given, classes)
    return {name: _fraction(name, given.get(name, 1)) for name in classes}


def _fraction(name: str, value: float | Fraction) -> Fraction:
    """Return a fraction as it is; of a float the simple one that it stands for (1/3), or the decimal that it prints."""
    try:
        exact = Fraction(str(value))
    except ValueError as error:
        raise DataError(f"{name} is given {value!r}, which is no number of visits or share. Give 0 or more.") from error
    simple = exact.limit_denominator(1000)
    return simple if isinstance(value, float) and float(simple) == value else exact


def _check_classes(what: str, given: Mapping[str, object], classes: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise DataError(f"{what} is a {type(given).__name__}, and classes have to be named: {{'open/psf': 2}}.")
    unknown = sorted(set(given) - set(classes))
    if unknown:
        raise DataError(f"{what} names {', '.join(unknown)}, and the data have the classes {', '.join(classes)}.")


def visits_of(
    repeats: Mapping[str, Fraction],
    choose: Mapping[str, int],
    epoch_size: int | None,
    rows: Mapping[str, int],
) -> dict[str, Fraction]:
    """Return how often an epoch visits each class, exactly.

    Args:
        repeats: as given.
        choose: rows an epoch of some classes, in place of their repeats.
        epoch_size: rows of an epoch, shared out in the proportion of the visits; None takes what they come to.
        rows: of each class.

    Raises:
        DataError: rows are asked of a class that has none, or of one whose repeats are given as well.
    """
    _check_classes("choose", choose, list(rows))
    for name, wanted in choose.items():
        if repeats[name] != 1:
            raise DataError(
                f"{name} has repeats={float(repeats[name]):g}, and {wanted} rows an epoch. Give one of them."
            )
        if wanted < 0 or (wanted and not rows[name]):
            raise DataError(f"{wanted} rows an epoch can't be had of {name}, which has {rows[name]}.")
    visits = dict(repeats) | {name: Fraction(wanted, max(1, rows[name])) for name, wanted in choose.items()}
    total = sum((visits[name] * rows[name] for name in rows), Fraction(0))
    if epoch_size is None or not total:
        return visits
    if epoch_size < 1:
        raise DataError(f"An epoch of {epoch_size} rows has no end. Give 1 or more.")
    return {name: visit * epoch_size / total for name, visit in visits.items()}
