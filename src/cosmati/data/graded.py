"""What was measured of sources: the band of each, and its grades by measure, which their shards say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cosmati.errors import DataError

BandAndGrades = tuple[int, tuple[tuple[str, str], ...]]


class SourceKind(NamedTuple):
    """What all rows of a source share beside their class; rows of another kind are a source of their own.

    Args:
        band: number of the quality band.
        grades: measure and grade, in the order of measures' names.
        also: other classes to which the rows belong, in order.
    """

    band: int = 0
    grades: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()

    @classmethod
    def of_journal(cls, entry: Mapping[str, Any]) -> SourceKind:
        """Return the kind that a source was begun with; older journals don't speak of all of it."""
        grades = tuple(sorted((entry.get("grades") or {}).items()))
        return cls(entry.get("band", 0), grades, tuple(sorted(entry.get("also", ()))))

    def __str__(self) -> str:
        told = [f"band {self.band}"] if self.band else []
        told += [f"{name} {grade}" for name, grade in self.grades] + [f"also {name}" for name in self.also]
        return ", ".join(told)


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


def kind_of(source: MeasuredSource | SourceKind) -> BandAndGrades:
    """Return band and grades of a source's rows, or of those of a kind."""
    grades = source.grades if isinstance(source, SourceKind) else source.grades.items()
    return source.band, tuple(sorted(grades))


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


def also_said(url: str, own: Any) -> list[str]:  # noqa: ANN401  (see above)
    """Return the classes to which an index says that its rows belong, too.

    Raises:
        DataError: they aren't names.
    """
    found = own.get("also", []) if isinstance(own, dict) else []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise DataError(f"{url} says that rows are also {found!r:.80}, and that's a list of classes. Write it again.")
    return found
