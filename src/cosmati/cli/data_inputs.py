"""What `cosmati data write` is told of its inputs, made into rows; and what of it the data set notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from cosmati.cli.data_measures import SaidOfRows
from cosmati.corpora.python_rows import read_python_packages
from cosmati.data.graded import SourceKind
from cosmati.data.ingest import (
    ORIGIN_COLUMNS,
    Kind,
    Rows,
    class_by_field,
    kind_of_files,
    read_image_folder,
    read_jsonl,
    read_parquet,
    read_text,
)
from cosmati.data.ingest.jsonl import infer_columns
from cosmati.data.ingest.measured import kinds_in
from cosmati.data.ingest.people import PEOPLE
from cosmati.data.packing import Packing, pack_rows
from cosmati.data.tokens import ByteTokenizer, tokenize
from cosmati.errors import DataError
from cosmati.provenance.taxonomy import software_licences


@dataclass(frozen=True)
class Inputs:
    """The inputs, and how they're read.

    Attributes:
        paths: files and directories.
        said: the kind, if it was said.
        class_path: of all rows, or empty.
        class_field: the field that holds each row's class, or empty.
        text_field: the field that holds the text to pack, or empty for `text`.
        pack: tokens of a pack, or 0.
        with_labels: give images the labels of their folders.
        skip_bad_rows: leave them out.
        said_of_rows: what else is said of them.

    Raises:
        DataError: what was said doesn't go together.
    """

    paths: tuple[Path, ...]
    said: Kind | None
    class_path: str
    class_field: str
    text_field: str
    pack: int
    with_labels: bool
    skip_bad_rows: bool
    said_of_rows: SaidOfRows

    def __post_init__(self) -> None:
        kind, given = self.kind, bool(self.class_path) + bool(self.class_field)
        if kind is Kind.PACKAGES and given:
            raise DataError("Packages have the class of their licence. Leave --class and --class-field out.")
        if given > 1:
            raise DataError("--class is of all rows, and --class-field of each. Give one of them.")
        if kind is not Kind.PACKAGES and not given:
            hint = ", or --class-field FIELD" if kind.has_fields else ""
            raise DataError(f"Rows have no class. Give --class open/permissive, say{hint}.")
        if self.class_field and not kind.has_fields:
            raise DataError(f"--class-field names a field of JSON Lines or Parquet, and these are {kind}. Use --class.")
        for name, option in () if kind.has_fields else self.said_of_rows.fields.items():
            all_rows = option.removesuffix("-field")
            raise DataError(
                f"{option} names {name!r}, a field of JSON Lines or Parquet, and these are {kind}. Use {all_rows}."
            )
        if self.text_field and not (kind.has_fields and self.pack):
            why = "rows that aren't packed keep all fields" if kind.has_fields else f"these are {kind}"
            raise DataError(
                f"--text-field says which field of JSON Lines or Parquet --pack reads, and {why}. Leave it out."
            )
        if self.pack and kind is Kind.IMAGES:
            raise DataError("--pack packs text, and these are images. Leave it out.")

    @cached_property
    def kind(self) -> Kind:
        """What the inputs are."""
        if self.said is Kind.PACKAGES:
            return self.said
        if not self.paths:
            raise DataError("There is nothing to read. Name files or directories after OUT.")
        return kind_of_files(self.paths, self.said)

    def reading(self) -> dict[str, str]:
        """Return what the data set notes: how the inputs become rows."""
        told = {
            "kind": str(self.kind),
            "class": self.class_path,
            "class field": self.class_field,
            "text field": "" if self.text_field == "text" else self.text_field,
            "pack": str(self.pack or ""),
            "labels": "" if self.with_labels else "none",
            "bad rows": "left out" if self.skip_bad_rows else "",
            **self.said_of_rows.reading(),
        }
        return {name: value for name, value in told.items() if value}

    def rows(self, label_names: Sequence[str] = ()) -> Rows:
        """Return the rows, lazily.

        Args:
            label_names: labels that have their numbers already.
        """
        rows = self.said_of_rows.said_of(self._read(label_names))
        fields = self.said_of_rows.fields
        if not self.pack and not fields:
            return rows
        if self.kind is Kind.PACKAGES and rows.kind_of is None:
            found = [(name, SourceKind()) for name in software_licences().classes]
        elif self.class_path and not fields:
            found = [(self.class_path, rows.kind({}))]
        else:
            # One pass to know all classes and kinds: each fills packs of its own, and what a row says wrongly is
            # refused before anything is written.
            found = kinds_in(rows)
        if not self.pack:
            return rows
        column = "content" if self.kind is Kind.PACKAGES else self.text_field or "text"
        tokens = tokenize(rows, ByteTokenizer(), column=column)
        names, kinds = [name for name, _ in found], [kind for _, kind in found]
        return pack_rows(tokens, Packing(length=self.pack), class_names=names, kinds=kinds)

    def _read(self, label_names: Sequence[str]) -> Rows:
        on_error: Literal["raise", "record"] = "record" if self.skip_bad_rows else "raise"
        class_of = class_by_field(self.class_field) if self.class_field else self.class_path
        match self.kind:
            case Kind.PACKAGES:
                return read_python_packages(self.paths or None, on_error=on_error)
            case Kind.JSONL:
                columns = self.said_of_rows.encodings(infer_columns(self.paths))
                return read_jsonl(
                    self.paths,
                    self._fields_to_pack(columns) if self.pack else columns,
                    class_of=class_of,
                    on_error=on_error,
                    strict=not self.pack,
                )
            case Kind.PARQUET:
                read = partial(read_parquet, self.paths, class_of=class_of, on_error=on_error)
                there = {name: kind for name, kind in read().columns.items() if name not in ORIGIN_COLUMNS}
                return read(columns=list(self._fields_to_pack(there))) if self.pack else read()
            case Kind.IMAGES:
                return read_image_folder(
                    self.paths,
                    class_of=class_of,
                    on_error=on_error,
                    with_labels=self.with_labels,
                    label_names=label_names,
                )
            case Kind.TEXT:
                return read_text(self.paths, class_of=class_of, on_error=on_error)

    def _fields_to_pack(self, there: dict[str, str]) -> dict[str, str]:
        """Return the fields of JSON Lines and Parquet that packs are made from, whatever else rows have.

        Args:
            there: all fields.

        Raises:
            DataError: there's no such field, or no text in it.
        """
        text, fields = self.text_field or "text", self.said_of_rows.fields
        for name, option in ((text, "--text-field"), (self.class_field, "--class-field"), *fields.items()):
            if name and name not in there:
                raise DataError(
                    f"The rows have no field {name!r}. They have {', '.join(map(repr, there))}: name one with {option}."
                )
        if there[text] != "str":
            others = ", ".join(repr(name) for name, kind in there.items() if kind == "str") or "no field"
            raise DataError(f"Field {text!r} holds no text. Text is in {others}: name it with --text-field.")
        people = [name for name in PEOPLE if name in there]
        return {name: there[name] for name in (text, self.class_field, *people, *fields) if name}
