"""What `cosmati data write` is told of rows beside their class: of all of them, or by a field of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cosmati.data.ingest.measured import OfRow, measure, of_field
from cosmati.data.ingest.people import PEOPLE, attribute
from cosmati.data.ingest.rows import Rows
from cosmati.errors import DataError
from cosmati.routing.bands import Bands
from cosmati.routing.measures import Grading
from cosmati.routing.policy_file import PolicyFile, load_policy


class Said(NamedTuple):
    """A word that holds for all rows, or the field of each that says it."""

    text: str
    is_field: bool


@dataclass(frozen=True)
class SaidOfRows:
    """What was measured of rows, which classes they belong to besides, and who has made them.

    Attributes:
        policy: file of the policy that says which grades there are, and grades numbers by its thresholds.
        grade: of all rows, `evidence=trial` and the like.
        grade_field: the fields that say them, `evidence=level` and the like.
        also: other classes of all rows.
        also_field: the field that says them.
        by: who has labelled or rated all rows: `annotator=ada` and the like.
        by_field: the fields that say it: `annotator=reviewer` and the like.

    Raises:
        DataError: it isn't of that form, is said twice, or isn't of the policy.
    """

    policy: Path | None = None
    grade: Sequence[str] = ()
    grade_field: Sequence[str] = ()
    also: Sequence[str] = ()
    also_field: str = ""
    by: Sequence[str] = ()
    by_field: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.also and self.also_field:
            raise DataError("--also is of all rows, and --also-field of each. Give one of them.")
        if wrong := next((name for name in self.people if name not in PEOPLE), None):
            msg = f"--by {wrong} is no field of people's. The fields are {', '.join(PEOPLE)}."
            raise DataError(f"{msg} Give --by annotator=ada, say.")
        if (policy := self._policy) is None:
            return
        known = [*policy.measures, *([policy.bands.measure] if policy.bands is not None else [])]
        wrong = next((name for name in self.grades if name not in known), None)
        if wrong is not None or not self.grades:
            what = f"has no measure {wrong!r}" if wrong else "says which grades there are, and no --grade names one"
            raise DataError(
                f"{self.policy} {what}. It measures {', '.join(known) or 'nothing'}: name that, or mend it."
            )

    @cached_property
    def people(self) -> dict[str, Said]:
        """Who has labelled or rated rows, by `annotator` and the like."""
        return _pairs("--by", self.by, self.by_field, "annotator=ada")

    @property
    def ids(self) -> tuple[str, ...]:
        """Who has labelled or rated all rows."""
        return tuple(said.text for said in self.people.values() if not said.is_field)

    @cached_property
    def grades(self) -> dict[str, Said]:
        """What was measured, by measure."""
        return _pairs("--grade", self.grade, self.grade_field, "evidence=trial")

    @cached_property
    def _policy(self) -> PolicyFile | None:
        return None if self.policy is None else load_policy(self.policy)

    @property
    def fields(self) -> dict[str, str]:
        """The fields of rows that are read, each with the option that names it."""
        named = {said.text: "--by-field" for said in self.people.values() if said.is_field}
        named |= {said.text: "--grade-field" for said in self.grades.values() if said.is_field}
        return named | ({self.also_field: "--also-field"} if self.also_field else {})

    def encodings(self, inferred: dict[str, str]) -> dict[str, str]:
        """Return encodings of columns, with those of what was measured for any value that it may have.

        Args:
            inferred: from the first row.
        """
        numbers = {s.text: "float64" for s in self.grades.values() if inferred.get(s.text) == "int" and s.is_field}
        return inferred | numbers | ({self.also_field: "json"} if self.also_field in inferred else {})

    def reading(self) -> dict[str, str]:
        """Return what the data set notes: all that makes a row of its kind."""
        said = {**{name.replace("_", " "): one for name, one in self.people.items()}, **self.grades}
        told = {f"{name}{' field' if one.is_field else ''}": one.text for name, one in said.items()}
        for name in self.grades:
            rules = [one.model_dump(mode="json", exclude_none=True) for one in self._rules_of(name) if one is not None]
            told[f"{name} by"] = json.dumps(rules, sort_keys=True) if rules else ""
        return told | {"also": ", ".join(sorted(self.also)), "also field": self.also_field}

    def said_of(self, rows: Rows) -> Rows:
        """Return the rows with what is said of them.

        Raises:
            DataError: they have no such field, or it can't be said.
        """
        for name, option in self.fields.items():
            if name not in rows.columns:
                there = ", ".join(map(repr, rows.columns))
                raise DataError(f"The rows have no field {name!r}. They have {there}: name one with {option}.")
        rows = attribute(rows, **{name: _of(said, _id) for name, said in self.people.items()})
        if not (self.grades or self.also or self.also_field):
            return rows
        grades: dict[str, str | OfRow] = {}
        band: int | OfRow = 0
        for name, said in self.grades.items():
            bands, grading = self._rules_of(name)
            if bands is not None:
                band = _of(said, bands.read)
            if grading is not None or bands is None:
                grades[name] = _of(said, grading.read if grading is not None else _same)
        return measure(rows, band=band, grades=grades, also=of_field(self.also_field) if self.also_field else self.also)

    def _rules_of(self, name: str) -> tuple[Bands | None, Grading | None]:
        """Return what the policy makes of a measure: bands, grades, or both."""
        if self._policy is None:
            return None, None
        bands = self._policy.bands
        return (bands if bands is not None and bands.measure == name else None), self._policy.measures.get(name)


def _pairs(option: str, all_rows: Sequence[str], by_field: Sequence[str], example: str) -> dict[str, Said]:
    """Return what is said by two options, the second of which names fields, by what stands before the `=`.

    Raises:
        DataError: something isn't of that form, or is said twice.
    """
    found: dict[str, Said] = {}
    given = [(option, one, False) for one in all_rows] + [(f"{option}-field", one, True) for one in by_field]
    for name_of, one, is_field in given:
        name, _, text = one.partition("=")
        if not name or not text:
            raise DataError(f"{name_of} {one} has no name and word. Give {option} {example}, say.")
        if name in found:
            raise DataError(f"{name_of} {one} says {name} a second time. Say it once.")
        found[name] = Said(text, is_field)
    return found


def _of(said: Said, read: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (what is read, or what reads it of a row)
    if said.is_field:
        return of_field(said.text, read)
    try:
        return read(said.text)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(
            f"{str(error).rstrip('.')}. Name one of them for all rows, or the field that says it."
        ) from error


def _same(value: object) -> object:
    return value


def _id(value: object) -> object:
    """Return the id of somebody as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
