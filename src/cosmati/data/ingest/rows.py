"""What every reader hands on: rows one by one, the columns they have, their class and their origin."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cosmati.data.faults import is_of_the_environment
from cosmati.data.graded import SourceKind
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.errors import DataError

Row = dict[str, Any]
"""Values by column: bytes, str, int, float, numpy arrays or what JSON holds."""

ClassOf = Callable[[Mapping[str, Any]], str]
"""Gives a row's class path; raises DataError where it can't."""

KindOf = Callable[[Mapping[str, Any]], SourceKind]
"""Gives what was measured of a row; raises DataError where it can't."""

OnError = Literal["raise", "record"]

ORIGIN_COLUMNS: Mapping[str, str] = MappingProxyType(
    {"origin_file": "str", "origin_place": "int", "origin_sha256": "bytes"}
)
"""Columns that every row has, with their encodings.

`origin_file` is the file's name relative to what was read, with forward slashes, or a data set's name;
`origin_place` the line on which the row begins, counted from 1, or the row of a data set, counted from 0;
`origin_sha256` the 32 bytes of the record's digest, as the record lies in the file.
"""

_CLASS_PATH = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)*")


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was left out, and why.

    Attributes:
        file: as in `origin_file`.
        place: as in `origin_place`.
        reason: what is wrong with it.
    """

    file: str
    place: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, {self.place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class OriginFile:
    """A file that holds several rows, or a data set.

    Attributes:
        name: as in `origin_file`.
        num_bytes: length of the file as it lies, compressed or not; 0 for a data set that is no file.
        sha256: digest of the file as it lies, in hex. Of a data set: SHA-256 of its rows' digests in a row.
    """

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What one pass over rows leaves behind.

    Attributes:
        on_error: `raise` ends the pass at a bad row; `record` leaves it out and notes it here.
        skipped: rows that were left out.
        files: files that were read to their end, in order.
    """

    on_error: OnError
    skipped: list[SkippedRow] = field(default_factory=list)
    files: list[OriginFile] = field(default_factory=list)

    def reject(self, file: str, place: int, reason: str, because: BaseException | None = None) -> None:
        """Note a bad row, or raise.

        Args:
            file: as in `origin_file`.
            place: as in `origin_place`.
            reason: what is wrong.
            because: the error that said so.

        Raises:
            EnvironmentFaultError: it came of a disk, a limit, a permission or memory.
            DataError: the pass is to end at a bad row.
        """
        bad = SkippedRow(file, place, reason)
        if because is not None and is_of_the_environment(because):
            msg = f"{bad}. That's of the machine and not of the row, so it isn't left out. Mend it, and read again."
            raise EnvironmentFaultError(msg) from because
        if self.on_error == "raise":
            raise DataError(
                f"{bad}. Mend it, or leave such rows out and list them, with on_error='record' (--skip-bad-rows)."
            )
        self.skipped.append(bad)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one reader. Iterating reads them, lazily; each iteration starts anew.

    Args:
        columns: encoding of each column, in the names of MDS; every row has exactly these.
        class_of: the class path of all rows, or a function of a row.
        read: starts a pass: yields rows, and reports bad ones to the Reading that it's given.
        on_error: what becomes of a bad row: `raise`, or `record` (see `Reading`).
        label_names: for columns of labels, the name of each number.
        left_out: how many files or records are no rows by rule, and which rule; none of these is an error.
        inputs: computes the SHA-256 in hex of what is read, by the names in `origin_file`; none where that isn't known.
        kind_of: gives what was measured of a row (see `measure`); None where nothing was.
        packed: of packs of several classes, class and kind of the rows that each class id in their spans means.

    Raises:
        DataError: a class path isn't of the form `open/permissive`, or `on_error` is neither.
    """

    columns: Mapping[str, str]
    class_of: str | ClassOf
    read: Callable[[Reading], Iterator[Row]]
    on_error: OnError = "raise"
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    inputs: Callable[[], Mapping[str, str]] = dict
    kind_of: KindOf | None = None
    packed: Sequence[tuple[str, SourceKind]] = ()
    _passes: list[Reading] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.on_error not in {"raise", "record"}:
            raise DataError(f"on_error={self.on_error!r} is neither 'raise' nor 'record'.")
        if isinstance(self.class_of, str):
            check_class_path(self.class_of)

    def __iter__(self) -> Iterator[Row]:
        reading = Reading(self.on_error)
        self._passes[:] = [reading]
        return self.pass_over(reading)

    def pass_over(self, reading: Reading) -> Iterator[Row]:
        """Yield the rows that have a class, and of which is known what is to be; bad ones go to `reading`."""
        classes: set[str] = set()
        for row in self.read(reading):
            try:
                if not isinstance(self.class_of, str):
                    path = self.class_of(row)
                    if path not in classes:
                        check_class_path(path)
                        classes.add(path)
                if self.kind_of is not None:
                    self.kind_of(row)
            except DataError as error:
                where = row.get("origin_file", "a row"), row.get("origin_place", 0)
                reading.reject(*where, str(error).rstrip("."), error)
                continue
            yield row

    def class_path(self, row: Mapping[str, Any]) -> str:
        """Return a row's class path."""
        return self.class_of if isinstance(self.class_of, str) else self.class_of(row)

    def kind(self, row: Mapping[str, Any]) -> SourceKind:
        """Return what was measured of a row."""
        return SourceKind() if self.kind_of is None else self.kind_of(row)

    def keep(self, names: Sequence[str]) -> Rows:
        """Return rows with some of the columns; keep those that say their class, and what was measured of them.

        Raises:
            DataError: there is no such column.
        """
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise DataError(f"There is no column {', '.join(unknown)}. There is {', '.join(self.columns)}.")

        def read(reading: Reading) -> Iterator[Row]:
            return ({name: row[name] for name in names} for row in self.pass_over(reading))

        columns = MappingProxyType({name: self.columns[name] for name in names})
        return dataclasses.replace(self, columns=columns, read=read)

    @property
    def skipped(self) -> Sequence[SkippedRow]:
        """Rows that the latest pass left out so far."""
        return tuple(self._passes[0].skipped) if self._passes else ()

    @property
    def files(self) -> Sequence[OriginFile]:
        """Files that the latest pass has read to their end; readers of one row a file list none."""
        return tuple(self._passes[0].files) if self._passes else ()


def class_by_field(name: str, classes: Mapping[Any, str] | None = None) -> ClassOf:
    """Return a function that takes a row's class from one of its columns.

    Args:
        name: the column; it must be one of the rows' columns.
        classes: class path by the column's value; None where the value is the class path itself.
    """

    def class_of(row: Mapping[str, Any]) -> str:
        if name not in row:
            raise DataError(f"the class stands in column {name!r}, which isn't read: there is {', '.join(row)}")
        value = row[name]
        if classes is None:
            return str(value)
        if value not in classes:
            raise DataError(f"no class is given for {name}={value!r}: add it to the classes, `unknown` if need be")
        return classes[value]

    return class_of


def check_class_path(path: str) -> None:
    """Refuse what is no class path.

    Raises:
        DataError: it isn't one.
    """
    if not _CLASS_PATH.fullmatch(path):
        raise DataError(
            f"{path!r} is no class path: write names of [a-z0-9-]+ with slashes between, as open/permissive."
        )
