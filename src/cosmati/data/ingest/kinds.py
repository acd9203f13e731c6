"""What files are, by their names, so that nobody has to say it, and nobody can say it wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from cosmati.data.ingest.images import IMAGE_SUFFIXES
from cosmati.data.ingest.jsonl import JSONL_SUFFIXES
from cosmati.data.ingest.parquet import PARQUET_SUFFIXES
from cosmati.data.ingest.text import TEXT_SUFFIXES
from cosmati.errors import DataError


class Kind(StrEnum):
    """What a reader reads."""

    JSONL = "jsonl"
    TEXT = "text"
    IMAGES = "images"
    PACKAGES = "packages"
    PARQUET = "parquet"

    @property
    def has_fields(self) -> bool:
        """Whether rows have fields of their own, which may say their class and what was measured of them."""
        return self in {Kind.JSONL, Kind.PARQUET}


_SUFFIXES = {
    Kind.JSONL: JSONL_SUFFIXES,
    Kind.TEXT: TEXT_SUFFIXES,
    Kind.IMAGES: IMAGE_SUFFIXES,
    Kind.PARQUET: PARQUET_SUFFIXES,
}
_KNOWN = ", ".join(f"{kind} ({', '.join(suffixes[:3])}, ...)" for kind, suffixes in _SUFFIXES.items())


def kind_of_files(paths: Sequence[Path], kind: Kind | None = None) -> Kind:
    """Return what files are, and files below directories, by the ends of their names.

    Args:
        paths: files and directories.
        kind: what they're said to be; None to find out. Of a directory it takes the files of that kind.

    Raises:
        DataError: they are of several kinds, or of another than is said; or nothing tells.
    """
    found: dict[Kind, Path] = {}
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} doesn't exist.")
        files = (one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        own = _kinds(files)
        if kind is not None:
            own = {one: file for one, file in own.items() if one is not kind and not path.is_dir()}
        elif not own:
            raise DataError(f"Nothing tells what {path} is: known are {_KNOWN}. Say --kind, or name other files.")
        found |= own
    if kind is not None and found:
        other, file = next(iter(found.items()))
        raise DataError(f"{file} is of the kind {other}, not {kind}. Leave --kind out, or the file.")
    if len(found) > 1:
        listed = ", ".join(f"{one} ({file})" for one, file in sorted(found.items()))
        raise DataError(
            f"These are of several kinds: {listed}. Write each kind into a data set of its own; --kind takes those of "
            "one kind from a directory."
        )
    return kind or next(iter(found))


def _kinds(files: Iterable[Path]) -> dict[Kind, Path]:
    """Return a file of each kind that is among them."""
    found: dict[Kind, Path] = {}
    for file in files:
        name = file.name.lower()
        if name.endswith(".json"):
            raise DataError(f"{file} is JSON, of which no reader knows the rows. Give a row a line, as .jsonl.")
        for kind, suffixes in _SUFFIXES.items():
            if name.endswith(suffixes):
                found.setdefault(kind, file)
    return found
