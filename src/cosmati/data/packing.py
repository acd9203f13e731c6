"""Token rows packed into sequences of one length, each token's row and class kept as spans.

A pack is a function of the rows and their order alone. So packing while training and packing before writing shards
give the same packs; `pack_rows` writes them, `Pack.of_row` reads them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.graded import SourceKind
from cosmati.data.ingest.people import people_in
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, Reading, Row, Rows
from cosmati.errors import DataError

NO_ROW = -1
"""Row, class and document of padding."""


@dataclass(frozen=True)
class Packing:
    """How rows are packed.

    Args:
        length: tokens of a pack.
        class_pure: each pack holds rows of one class; the classes fill packs side by side.
        cut_rows: fill packs to the last token and cut rows where they end, so that only the last pack (of each class)
            is padded. Otherwise only rows longer than a pack are cut, each piece goes where it leaves the least room,
            and packs are padded.
        num_open: without cutting, how many packs (of each class) are open at once; more leave less padding.
        pad_id: token of the padding.

    Raises:
        DataError: the length or the number of open packs isn't positive.
    """

    length: int
    class_pure: bool = True
    cut_rows: bool = True
    num_open: int = 32
    pad_id: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.num_open < 1:
            raise DataError(f"length={self.length} and num_open={self.num_open} must be 1 at least.")


@dataclass(frozen=True, eq=False)
class Pack:
    """A sequence of one length.

    Attributes:
        tokens: int [length], padding at the end.
        spans: int64 [spans, 5], one line for each piece of a row, in order: row id, class id, start and stop in the
            pack, and the piece's start in the row.
    """

    tokens: NDArray[np.integer[Any]]
    spans: NDArray[np.int64]

    def pieces(self) -> Iterator[tuple[int, int, int, NDArray[np.integer[Any]]]]:
        """Yield row id, class id, start in the row and tokens of each piece."""
        for row, class_id, start, stop, offset in self.spans.tolist():
            yield row, class_id, offset, self.tokens[start:stop]

    def to_row(self) -> Row:
        """Return the columns `tokens` and `spans`, as `pack_columns` describes them."""
        return {"tokens": self.tokens, "spans": self.spans}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Pack:
        """Read a pack from the columns `tokens` and `spans`.

        Raises:
            DataError: the spans don't lie one after another in the tokens.
        """
        tokens, spans = np.asarray(row["tokens"]), np.asarray(row["spans"], np.int64)
        if tokens.ndim != 1 or spans.ndim != 2 or spans.shape[1] != 5 or not len(spans):
            shapes = f"tokens {tokens.shape} and spans {spans.shape}"
            raise DataError(f"A pack has tokens [length] and spans [spans, 5], not {shapes}. Write it again.")
        starts, stops = spans[:, 2], spans[:, 3]
        follows = starts[0] == 0 and np.array_equal(starts[1:], stops[:-1]) and bool((stops > starts).all())
        if not follows or stops[-1] > len(tokens):
            raise DataError(f"A pack's spans don't lie one after another in its {len(tokens)} tokens. Write it again.")
        return cls(tokens, spans)


@dataclass(slots=True)
class _Open:
    """A pack that is being filled."""

    room: int
    pieces: list[NDArray[np.integer[Any]]] = field(default_factory=list)
    spans: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def add(self, row: int, class_id: int, offset: int, piece: NDArray[np.integer[Any]]) -> None:
        start = self.spans[-1][3] if self.spans else 0
        self.spans.append((row, class_id, start, start + len(piece), offset))
        self.pieces.append(piece)
        self.room -= len(piece)

    def close(self, packing: Packing, dtype: str) -> Pack:
        tokens = np.full(packing.length, packing.pad_id, dtype)
        tokens[: packing.length - self.room] = np.concatenate(self.pieces)
        return Pack(tokens, np.asarray(self.spans, np.int64))


def pack(rows: Iterable[Mapping[str, Any]], packing: Packing, *, dtype: str = "int64") -> Iterator[Pack]:
    """Pack token rows, lazily and in their order.

    Every token of every row is in exactly one pack, and a row's tokens keep their order. Packs come as they are full;
    at the end the rest, by class, the oldest first. At most one open pack (`num_open` without cutting) a class is held.

    Args:
        rows: with `tokens` (integers [tokens]), `row_id` and `class_id`, such as a streamed source gives.
        packing: how.
        dtype: of the packs' tokens.

    Raises:
        DataError: a row lacks one of these, has no token, or one that the dtype can't hold.
    """
    info = np.iinfo(dtype)
    if not info.min <= packing.pad_id <= info.max:
        raise DataError(f"pad_id={packing.pad_id} is beyond {dtype}. Name a wider dtype, or another token.")
    opened: dict[int, list[_Open]] = {}
    for row in rows:
        tokens, row_id, class_id = _read(row, info)
        packs = opened.setdefault(class_id if packing.class_pure else NO_ROW, [])
        for filled in _place(packs, tokens, row_id, class_id, packing):
            yield filled.close(packing, dtype)
    for key in sorted(opened):
        for rest in opened[key]:
            yield rest.close(packing, dtype)


def _read(row: Mapping[str, Any], info: np.iinfo[Any]) -> tuple[NDArray[np.integer[Any]], int, int]:
    missing = [name for name in ("tokens", "row_id", "class_id") if name not in row]
    if missing:
        raise DataError(
            f"A row to pack has no {', '.join(missing)}; it has {', '.join(row)}. Use tokenize and number_rows."
        )
    tokens, row_id, class_id = np.asarray(row["tokens"]), int(row["row_id"]), int(row["class_id"])
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        what = f"{tokens.dtype} of shape {tokens.shape}"
        raise DataError(f"Row {row_id}: its tokens are {what}. They must be integers [tokens], one at least.")
    if tokens.min() < info.min or tokens.max() > info.max:
        raise DataError(f"Row {row_id} has tokens from {tokens.min()} to {tokens.max()}, beyond {info.dtype}.")
    return tokens, row_id, class_id


def _place(
    packs: list[_Open], tokens: NDArray[np.integer[Any]], row_id: int, class_id: int, packing: Packing
) -> Iterator[_Open]:
    """Put a row into open packs, and yield those that are done with, taken out of the list."""
    offset = 0
    while offset < len(tokens):
        left = min(len(tokens) - offset, packing.length)
        fitting = packs if packing.cut_rows else [one for one in packs if one.room >= left]
        if not fitting:
            if not packing.cut_rows and len(packs) == packing.num_open:
                fullest = min(range(len(packs)), key=lambda i: packs[i].room)
                yield packs.pop(fullest)
            fitting = [_Open(packing.length)]
            packs += fitting
        chosen = min(fitting, key=lambda one: one.room)
        piece = tokens[offset : offset + min(left, chosen.room)]
        chosen.add(row_id, class_id, offset, piece)
        offset += len(piece)
        if not chosen.room:
            packs[:] = [one for one in packs if one is not chosen]
            yield chosen


def number_rows(rows: Rows, class_names: Sequence[str], kinds: Sequence[SourceKind] = ()) -> Rows:
    """Give rows of a reader what `pack` wants: `row_id`, their place among the good rows, and `class_id`.

    Args:
        rows: of a reader.
        class_names: all classes; a class's place is its id. A row of another class is bad.
        kinds: what was measured of the rows of each; then a class may stand there several times, and a row of another
            kind is bad. Of several classes at once, a row is of the name that joins them.
    """
    pairs = zip(class_names, kinds, strict=True) if kinds else ((name, SourceKind()) for name in class_names)
    ids = {pair: number for number, pair in enumerate(pairs)}

    def read(reading: Reading) -> Iterator[Row]:
        number = 0
        for row in rows.pass_over(reading):
            path, kind = rows.class_path(row), rows.kind(row) if kinds else SourceKind()
            if (path, kind) in ids:
                yield row | {"row_id": number, "class_id": ids[path, kind]}
                number += 1
            else:
                of_kind = f" ({kind})" if str(kind) else ""
                reason = f"its class {path!r}{of_kind} isn't one of {', '.join(class_names)}"
                reading.reject(row["origin_file"], row["origin_place"], reason)

    columns = dict(rows.columns) | {"row_id": "int", "class_id": "int"}
    return dataclasses.replace(rows, columns=MappingProxyType(columns), read=read)


def pack_rows(
    rows: Rows,
    packing: Packing,
    *,
    class_names: Sequence[str],
    kinds: Sequence[SourceKind] = (),
    class_of: str | None = None,
) -> Rows:
    """Pack the token rows of a reader into rows that can be written as shards.

    The columns are `tokens` (of the encoding's fixed length), `spans` (see `Pack`) and `origins`: for each span the
    origin of its row, as [file, place, SHA-256 in hex]. Where rows have an `annotator`, a `label_function` or a
    `rater`, `people` holds these for each span. `origin_file`, `origin_place` and `origin_sha256` are those of the
    first.

    Args:
        rows: with a column `tokens`, as `tokenize` gives them.
        packing: how.
        class_names: all classes; a class's place is its id in the spans.
        kinds: what was measured of the rows of each (see `kinds_in`); class-pure packs are of one kind, too. It's
            needed where something was measured of the rows.
        class_of: class path of packs that hold several classes. Class-pure packs have their rows' class: give None.

    Raises:
        DataError: there is no column of tokens, packs of several classes have no class path, or rows of several kinds
            would be of one.
    """
    dtype = _dtype_of_tokens(rows)
    if packing.class_pure != (class_of is None):
        msg = (
            f"class_pure={packing.class_pure} and class_of={class_of!r} don't go together: packs of one class have "
            "that class, and packs of several need a class_of= that says how the mixture is to be governed."
        )
        raise DataError(msg)
    if rows.kind_of is not None and not kinds:
        raise DataError(
            "Something was measured of the rows, and packs would be of several kinds. Give class_names= and kinds= as "
            "`kinds_in(rows)` pairs them."
        )
    numbered, names = number_rows(rows, class_names, kinds), people_in(rows.columns)

    def class_path(row: Mapping[str, Any]) -> str:
        return class_names[int(row["spans"][0, 1])]

    def kind_of(row: Mapping[str, Any]) -> SourceKind:
        return kinds[int(row["spans"][0, 1])]

    told = {"origins": "json"} | ({"people": "json"} if names else {})
    columns = pack_columns(packing.length, dtype) | told | dict(ORIGIN_COLUMNS)
    return dataclasses.replace(
        rows,
        columns=MappingProxyType(columns),
        class_of=class_of or class_path,
        packed=() if packing.class_pure else tuple(zip(class_names, kinds or repeat(SourceKind()), strict=False)),
        kind_of=kind_of if rows.kind_of is not None and packing.class_pure else None,
        read=lambda reading: _packed_rows(reading, numbered, names, packing, dtype),
        label_names={},
    )


def _packed_rows(reading: Reading, numbered: Rows, names: Sequence[str], packing: Packing, dtype: str) -> Iterator[Row]:
    """Yield packs as rows, with the origin of each span, and people's columns `names` of it."""
    origins: dict[int, list[Any]] = {}
    people: dict[int, dict[str, str]] = {}
    num_left: dict[int, int] = {}

    def noted() -> Iterator[Row]:
        for row in numbered.pass_over(reading):
            origins[row["row_id"]] = [row["origin_file"], row["origin_place"], row["origin_sha256"].hex()]
            people[row["row_id"]] = {name: row[name] for name in names}
            num_left[row["row_id"]] = len(row["tokens"])
            yield row

    for full in pack(noted(), packing, dtype=dtype):
        listed = [origins[row] for row in full.spans[:, 0].tolist()]
        who = {"people": [people[row] for row in full.spans[:, 0].tolist()]} if names else {}
        for row, _, _, piece in full.pieces():
            num_left[row] -= len(piece)
            if not num_left[row]:  # all of it is packed
                del num_left[row], origins[row], people[row]
        file, place, sha256 = listed[0]
        origin = {"origin_file": file, "origin_place": place, "origin_sha256": bytes.fromhex(sha256)}
        yield full.to_row() | {"origins": listed} | who | origin


def _dtype_of_tokens(rows: Rows) -> str:
    found = rows.columns.get("tokens", "missing")
    kind, dtype, *_ = [*found.split(":"), "float64"]
    if kind != "ndarray" or np.dtype(dtype).kind not in "iu":
        raise DataError(f"Column 'tokens' is {found}, not an ndarray of integers. Tokenize first.")
    return dtype


def pack_columns(length: int, dtype: str) -> dict[str, str]:
    """Return the encodings of `Pack.to_row`."""
    return {"tokens": f"ndarray:{dtype}:{length}", "spans": "ndarray:int64"}
