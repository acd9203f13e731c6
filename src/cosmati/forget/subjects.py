"""Which rows are a person's or a customer's: an index that answers who has its key, and tells nobody else anything.

A subject's tag is HMAC-SHA256 of its id under the key. Its i-th row is a record of 32 bytes: HMAC(tag, i) gives the
label by which the record is found, and what its row number is hidden with (the dictionary of Cash et al., 2014,
"Dynamic Searchable Encryption in Very-Large Databases"). Records lie in the order of their labels, so that without the
key the file is noise: neither who is in it, nor which rows belong together, nor how many somebody has. It shows the
names of the fields, and how many records there are, up to 12 % of padding (Nikitin et al., 2019, arXiv 1806.03160).
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import sqlite3
import stat
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from cosmati.data.opened import OpenedSource
from cosmati.data.people import ChosenRows
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError, TamperError
from cosmati.forget.reading import OnShare, columns_of, every_row, holds_packs, rows_digest, untold
from cosmati.storage.atomic import create_secret, draft_of, publish

_MAGIC = b"cosmati subjects 1\n"
_KEY_BYTES, _RECORD_BYTES, _MAC_BYTES = 32, 32, 32
_LABEL_BYTES = 16
_NO_DOCUMENT = 2**64 - 1
_CHUNK_BYTES = 1 << 24
_OF_DOCUMENTS = ("annotator", "label_function", "rater", "origin_file")
"""Fields that packs keep of each document."""


@dataclass(frozen=True)
class Indexed:
    """What an index was made of.

    Attributes:
        num_subjects: different ids.
        num_rows: rows, or documents of packs, that name at least one.
        num_unnamed: rows and documents that name nobody.
        without: classes of sources that have none of the fields, whose rows nobody can be asked for.
    """

    num_subjects: int
    num_rows: int
    num_unnamed: int
    without: tuple[str, ...]


def make_key(path: Path) -> bytes:
    """Draw a key into a new file that only its owner may read (mode 0600), and return it.

    Raises:
        DataError: there is a file already.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        create_secret(path, key.hex().encode() + b"\n")
    except FileExistsError:
        raise DataError(f"{path} is there already, and a key isn't written over. Name another file.") from None
    return key


def read_key(path: Path) -> bytes:
    """Return the key that a file holds.

    Raises:
        DataError: there is none, others may read it, or it holds something else.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as a key: {error}. Name the file that index-subjects made.") from error
    if stat.S_IMODE(mode) & 0o077:
        raise DataError(f"Others may read the key {path}: who has it can ask who is in the data. Run: chmod 600 {path}")
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise DataError(f"{path} holds no key, which is {2 * _KEY_BYTES} hexadecimal digits. Name another file.")
    return key


def index_subjects(
    dataset: StreamingDataset, fields: Sequence[str], path: Path, key: bytes, *, on_share: OnShare = untold
) -> Indexed:
    """Write the index of a data set's subjects; all rows of all its sources are read once, in bounded memory.

    A field holds an id, or a list of ids: text, or whole numbers, which count as their digits. Several fields share
    their subjects: `7` as an author is `7` as a reader. Ids are compared letter by letter, in Unicode's form NFC.

    Args:
        dataset: whose rows, or documents of packs.
        fields: names of columns; of packs `annotator`, `label_function`, `rater` or `origin_file`.
        path: of the index, which is put there whole or not at all.
        key: 32 bytes.
        on_share: told how far it is.

    Raises:
        DataError: no source has a field, or it holds no ids, or a row can't be read.
    """
    without = _without(dataset, fields)
    # A file of SQLite's own that has no name: it sorts beyond memory, and a crash leaves nothing of it.
    with closing(sqlite3.connect("")) as sorter:
        sorter.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE found (tag BLOB, row_id INT, document INT);"
            "CREATE TABLE records (record BLOB)"
        )
        counted = _collect(sorter, dataset, fields, key, on_share)
        num_records, num_subjects = _seal(sorter)
        header = {
            "data": rows_digest(dataset),
            "fields": list(fields),
            "key": _key_id(key),
            "records": num_records,
            "without": without,
        }
        found = (record for (record,) in sorter.execute("SELECT record FROM records ORDER BY record"))
        _write(path, _MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n", found, key)
    return Indexed(num_subjects, *counted, tuple(without))


def _without(dataset: StreamingDataset, fields: Sequence[str]) -> list[str]:
    """Return the classes of sources that have none of the fields.

    Raises:
        DataError: there's no field, or one that no source has.
    """
    known = {source.url: _fields_of(source) for source in dataset.sources if source.num_rows}
    missing = [name for name in fields if not any(name in names for names in known.values())]
    if missing or not fields:
        has = "; ".join(f"{url} has {', '.join(sorted(names)) or 'none'}" for url, names in known.items())
        raise DataError(
            f"No row has a field {', '.join(map(repr, missing)) or 'that was named'} to say whose it is: {has}. Name "
            "one of these, or write the data with it."
        )
    return sorted({one.class_path for one in dataset.sources if one.num_rows and not known[one.url] & {*fields}})


def _fields_of(source: OpenedSource) -> set[str]:
    """Return the fields that can say whose a row is; of packs those that they may keep of documents."""
    columns = {*columns_of(source)}
    if not holds_packs(source):
        return columns
    return {*(_OF_DOCUMENTS[:3] if "people" in columns else ()), *(_OF_DOCUMENTS[3:] if "origins" in columns else ())}


def _collect(
    sorter: sqlite3.Connection, dataset: StreamingDataset, fields: Sequence[str], key: bytes, on_share: OnShare
) -> tuple[int, int]:
    """Note a tag for each row and subject; return how many rows name somebody, and how many nobody."""
    counted = {True: 0, False: 0}

    def noted() -> Iterator[tuple[bytes, int, int]]:
        for part in every_row(dataset, lambda source: _wanted(source, fields), on_share):
            for row_id, document, told in _told(part.rows, fields):
                ids = {one for field, value in told.items() for one in _ids_in(value, field, row_id)}
                counted[bool(ids)] += 1
                for one in ids:
                    yield _tag(key, one), row_id, document

    sorter.executemany("INSERT INTO found VALUES (?, ?, ?)", noted())
    return counted[True], counted[False]


def _wanted(source: OpenedSource, fields: Sequence[str]) -> set[str]:
    return {*columns_of(source)} & ({"spans", "people", "origins"} if holds_packs(source) else {*fields})


def _told(rows: RowBatch, fields: Sequence[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield row id, document (of a pack, else -1), and what stands in the fields that are there."""
    columns = rows.columns
    for index, row_id in enumerate(rows.row_ids.tolist()):
        if "spans" not in columns:
            yield row_id, -1, {field: columns[field][index] for field in fields if field in columns}
            continue
        for place, document in enumerate(columns["spans"][index][:, 0].tolist()):
            told = dict(columns["people"][index][place]) if "people" in columns else {}
            told |= {"origin_file": columns["origins"][index][place][0]} if "origins" in columns else {}
            yield row_id, document, {field: told.get(field) for field in fields}


def _ids_in(value: Any, field: str, row_id: int) -> Iterator[str]:  # noqa: ANN401  (whatever a column holds)
    """Yield the ids in a field, as they're compared; nothing for what is empty.

    Raises:
        DataError: it's neither text nor a whole number, nor a list of such.
    """
    if isinstance(value, np.ndarray | list | tuple):
        for one in value:
            yield from _ids_in(one, field, row_id)
    elif isinstance(value, str) or (isinstance(value, int | np.integer) and not isinstance(value, bool)):
        if name := canonical(str(value)):
            yield name
    elif value is not None:
        raise DataError(
            f"Row {row_id}: {field} is {type(value).__name__}, and an id is text or a whole number, or a list of such. "
            "Name another field, or write the data with ids."
        )


def canonical(subject: str) -> str:
    """Return an id as it's compared: without white space around it, composed as Unicode's NFC has it."""
    return unicodedata.normalize("NFC", subject.strip())


def _tag(key: bytes, subject: str) -> bytes:
    return hmac.digest(key, b"subject\0" + subject.encode("utf-8", "surrogatepass"), "sha256")


def _key_id(key: bytes) -> str:
    return hmac.digest(key, b"id", "sha256")[:8].hex()


def _mac_of(key: bytes) -> hmac.HMAC:
    return hmac.new(hmac.digest(key, b"file", "sha256"), digestmod="sha256")


def _mask(tag: bytes, number: int) -> tuple[bytes, int]:
    """Return the label of a subject's record, and what hides its content."""
    drawn = hmac.digest(tag, number.to_bytes(8, "big"), "sha256")
    return drawn[:_LABEL_BYTES], int.from_bytes(drawn[_LABEL_BYTES:], "big")


def _seal(sorter: sqlite3.Connection) -> tuple[int, int]:
    """Make records of what was noted, and as many of nothing as the padding takes; return the number, and of tags."""
    counted = {"records": 0, "tags": 0}

    def sealed() -> Iterator[tuple[bytes]]:
        last, number = b"", 0
        for tag, row_id, document in sorter.execute("SELECT tag, row_id, document FROM found ORDER BY 1, 2, 3"):
            number = number + 1 if tag == last else 0
            counted["tags"] += tag != last
            last = tag
            label, mask = _mask(tag, number)
            content = row_id << 64 | (document if document >= 0 else _NO_DOCUMENT)
            counted["records"] += 1
            yield (label + (content ^ mask).to_bytes(16, "big"),)
        for _ in range(padded(counted["records"]) - counted["records"]):
            yield (secrets.token_bytes(_RECORD_BYTES),)

    sorter.executemany("INSERT INTO records VALUES (?)", sealed())
    return padded(counted["records"]), counted["tags"]


def padded(number: int) -> int:
    """Return a number rounded up to one with few significant bits: at most 12 % more (Padmé)."""
    exponent = number.bit_length() - 1
    if exponent < 1:
        return number
    mask = (1 << (exponent - exponent.bit_length())) - 1
    return (number + mask) & ~mask


def _write(path: Path, header: bytes, records: Iterable[bytes], key: bytes) -> None:
    draft, mac = draft_of(path), _mac_of(key)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in chain((header,), records):
                file.write(part)
                mac.update(part)
            file.write(mac.digest())
        publish(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def ids_to_delete(row_ids: Sequence[int], documents: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of rows, or of documents of packs, each once and rising.

    Raises:
        DataError: there are both, and a number would mean one of each.
    """
    if row_ids and documents:
        raise DataError(
            "Whole rows and documents of packs were found, and a number means another one in each: their ids can't "
            "stand in one list. Ask each data set by itself."
        )
    return tuple(sorted({*row_ids, *documents}))


class SubjectIndex:
    """An index that was read whole and is as it was written.

    Attributes:
        fields: names of the fields that it was made of.
        without: classes of sources that have none of them, whose rows it doesn't know.
    """

    def __init__(self, content: mmap.mmap, key: bytes, header: dict[str, Any], start: int) -> None:
        self._content, self._key, self._start, self._num = content, key, start, int(header["records"])
        self.fields: tuple[str, ...] = tuple(header["fields"])
        self.without: tuple[str, ...] = tuple(header["without"])

    @classmethod
    def open(cls, path: Path, key: bytes, dataset: StreamingDataset | None = None) -> Self:
        """Open an index; all of it is compared with its signature under the key.

        Args:
            path: of the index.
            key: that it was made with.
            dataset: the data that it's asked about; None can't tell whether it's of others.

        Raises:
            DataError: it's no index, was made with another key, or of other data.
            TamperError: it isn't what was written.
        """
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} can't be read as an index of subjects: {error}. Make it: index-subjects."
            ) from error
        end = content.find(b"\n", len(_MAGIC))
        if content[: len(_MAGIC)] != _MAGIC or end < 0:
            raise DataError(f"{path} is no index of subjects, or of another version. Make it: index-subjects.")
        mac, view = _mac_of(key), len(content) - _MAC_BYTES
        for start in range(0, max(view, 0), _CHUNK_BYTES):
            mac.update(content[start : min(start + _CHUNK_BYTES, view)])
        try:
            header = json.loads(content[len(_MAGIC) : end])
            is_ours = header["key"] == _key_id(key)
        except (ValueError, KeyError, TypeError) as error:
            raise TamperError(f"{path} isn't what was written: its header can't be read. Make it anew.") from error
        if not is_ours:
            raise DataError(f"{path} was made with another key than the one given. Give its own.")
        if not hmac.compare_digest(mac.digest(), content[max(view, 0) :]):
            raise TamperError(
                f"{path} isn't what was written: it was cut, changed, or written by others. Make it anew."
            )
        if dataset is not None and header["data"] != rows_digest(dataset):
            raise DataError(f"{path} is the index of other data, or of what these were before. Index them anew.")
        return cls(content, key, header, end + 1)

    def find(self, subject: str | int) -> ChosenRows:
        """Return the whole rows that name somebody, and the documents of packs that do, both rising.

        Raises:
            DataError: the id is empty.
        """
        if isinstance(subject, bool) or not (name := canonical(str(subject))):
            raise DataError(f"{subject!r} is nobody's id. Give text, or a whole number.")
        tag, found = _tag(self._key, name), list[tuple[int, int]]()
        while (content := self._record(*_mask(tag, len(found)))) is not None:
            found.append((content >> 64, content & _NO_DOCUMENT))
        rows = [row for row, document in found if document == _NO_DOCUMENT]
        documents = [pair for pair in found if pair[1] != _NO_DOCUMENT]
        return ChosenRows(np.asarray(rows, np.int64), np.asarray(documents, np.int64).reshape(-1, 2))

    def rows_of(self, subject: str | int, *, whole_packs: bool = False) -> tuple[int, ...]:
        """Return the ids by which somebody's rows are deleted, rising: of whole rows, or of packs the documents'.

        Args:
            subject: whose.
            whole_packs: packs are read as rows (not by a `PackedSource`), so that those that hold any go as a whole.

        Raises:
            DataError: the id is empty, or names both, whose numbers mean different things.
        """
        found = self.find(subject)
        if whole_packs:
            return tuple(sorted({*found.row_ids.tolist(), *found.documents[:, 0].tolist()}))
        return ids_to_delete(found.row_ids.tolist(), found.documents[:, 1].tolist())

    def _record(self, label: bytes, mask: int) -> int | None:
        """Return what stands behind a label; None where there's no such record."""

        def at(number: int, size: int = _LABEL_BYTES) -> bytes:
            start = self._start + number * _RECORD_BYTES
            return self._content[start : start + size]

        place = bisect_left(range(self._num), label, key=at)
        if place == self._num or at(place) != label:
            return None
        return int.from_bytes(at(place, _RECORD_BYTES)[_LABEL_BYTES:], "big") ^ mask
