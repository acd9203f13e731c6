"""What was measured of sources: the band of each, and its grades by measure, which their shards say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cosmati.errors import DataError

BandAndGrades = tuple[int, tuple[tuple[str, str], ...]]


class MeasuredSource(Protocol):
    """A source of which something was measured."""

    @property
    def band(self) -> int:
        """Number of the band."""
        ...

    @property
    def grades(self) -> Mapping[str, str]:
        """By measure."""
        ...


def kind_of(source: MeasuredSource) -> BandAndGrades:
    """Return band and grades of a source's rows."""
    return source.band, tuple(sorted(source.grades.items()))


def numbered(sources: Sequence[MeasuredSource]) -> dict[BandAndGrades, int]:
    """Return the number by which orders and batches call each kind: of data without grades, the band."""
    kinds = sorted({kind_of(source) for source in sources})
    has_grades = any(grades for _, grades in kinds)
    return {kind: number if has_grades else kind[0] for number, kind in enumerate(kinds)}


def grades_said(url: str, own: Any) -> dict[str, str]:  # noqa: ANN401  (as JSON has it)
    """Return the grades that an index says.

    Raises:
        DataError: they aren't words by measure.
    """
    found = own.get("grades", {}) if isinstance(own, dict) else {}
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise DataError(
            f"{url} says the grades {found!r:.80}, and grades are words by measure. Write the source again."
        )
    return found
