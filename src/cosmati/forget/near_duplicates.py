"""Rows that are nearly a text or an image that somebody holds: is this file in there?

Text: sets of shingles (Broder, 1997), all runs of nine characters of the text in lower case, white space made single.
Their likeness is Jaccard's: how many of both are in each. A row is a candidate if one band of its MinHash sketch is
that of the text (locality-sensitive hashing: Indyk and Motwani, 1998); bands are chosen for the threshold. Each
candidate is compared by its shingles themselves, so that what is found is found rightly, and only what is missed is a
matter of chance. A sketch is made by one permutation (Li, Owen and Zhang, 2012, arXiv 1208.1259), its empty bins
filled from others (Shrivastava, 2017, arXiv 1703.04664).

Images: difference hashes of 64 bits, each whether a pixel of the image at 9 x 8 is brighter than its left neighbour;
likeness is the share of equal bits. Turned, mirrored and cropped images aren't found, and plain areas are all alike.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.ingest.images import decode_image
from cosmati.data.opened import OpenedSource
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from cosmati.forget.reading import OnShare, RowsOfSource, columns_of, every_row, untold

NUM_BINS = 128
SHINGLE = 9
TEXT_THRESHOLD, IMAGE_THRESHOLD = 0.8, 0.9
_RECALL = 0.9999
"""At least of what is as like as the threshold, by the bands' own formula."""
_BYTES = 256
"""Tokens below are bytes of UTF-8, and this one ends a document."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, order=True)
class Likeness:
    """A row that is like what was asked.

    Attributes:
        similarity: 0 to 1.
        row_id: as lineage and ledger know it; of packs that of the first pack.
        document: of packs, the id of the document; None for a whole row.
        source: its place.
        class_path: of the source.
    """

    similarity: float
    row_id: int
    document: int | None
    source: str
    class_path: str


def like_text(
    dataset: StreamingDataset,
    texts: Mapping[str, str],
    *,
    threshold: float = TEXT_THRESHOLD,
    column: str = "text",
    on_share: OnShare = untold,
) -> dict[str, list[Likeness]]:
    """Return for each text the rows that are like it, the likest first. Each row is read once.

    Packs of bytes are read by document, where one's pieces lie in consecutive packs, as they do unless `num_open`
    mixes them; another piece stands for itself.

    Args:
        dataset: with a column of text, or packs of bytes.
        texts: by any name.
        threshold: Jaccard's likeness at least, in (0, 1].
        column: of the text.
        on_share: told how far it is.

    Raises:
        DataError: a threshold or a text that can't be, no such column, or a row that can't be read.
    """
    _check(threshold)
    asked = {name: normalised(text) for name, text in texts.items()}
    if empty := [name for name, text in asked.items() if not text]:
        raise DataError(f"{empty[0]} has no text to look for. Give a file with some.")
    bands = bands_for(threshold)
    sketches = {name: sketch(text) for name, text in asked.items()}
    sets = {name: shingles(text) for name, text in asked.items()}
    found: dict[str, list[Likeness]] = {name: [] for name in texts}
    for source, row_id, document, text in _texts(dataset, column, on_share):
        own = normalised(text)
        made = sketch(own)
        own_set: frozenset[str] | None = None
        for name, other in sketches.items():
            if (made == other).reshape(bands, -1).all(1).any():
                own_set = own_set if own_set is not None else shingles(own)
                similarity = jaccard(own_set, sets[name])
                if similarity >= threshold:
                    found[name].append(Likeness(similarity, row_id, document, source.url, source.class_path))
    return _ranked(found)


def like_image(
    dataset: StreamingDataset,
    images: Mapping[str, bytes],
    *,
    threshold: float = IMAGE_THRESHOLD,
    column: str = "image",
    on_share: OnShare = untold,
) -> dict[str, list[Likeness]]:
    """Return for each image the rows that are like it, the likest first. Each row is read once.

    Args:
        dataset: with a column of images.
        images: files by any name.
        threshold: share of equal bits at least, in (0, 1].
        column: of the images.
        on_share: told how far it is.

    Raises:
        DataError: a threshold that can't be, no such column, or an image that can't be decoded.
        MissingExtraError: Pillow isn't installed.
    """
    _check(threshold)
    asked = {name: difference_hash(data, name) for name, data in images.items()}
    found: dict[str, list[Likeness]] = {name: [] for name in images}
    for part in every_row(dataset, lambda source: {_known(source, column)} if source.num_rows else set(), on_share):
        for row_id, data in zip(part.rows.row_ids.tolist(), part.rows.columns[column], strict=True):
            own = difference_hash(data, f"row {row_id}")
            for name, other in asked.items():
                similarity = 1 - (own ^ other).bit_count() / 64
                if similarity >= threshold:
                    found[name].append(Likeness(similarity, row_id, None, part.source.url, part.source.class_path))
    return _ranked(found)


def _check(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise DataError(f"threshold={threshold}: likeness lies above 0, where all is like all, and is 1 at most.")


def _ranked(found: dict[str, list[Likeness]]) -> dict[str, list[Likeness]]:
    return {name: sorted(rows, key=lambda one: (-one.similarity, one.row_id)) for name, rows in found.items()}


def _known(source: OpenedSource, column: str) -> str:
    columns = columns_of(source)
    if column not in columns:
        raise DataError(f"{source.url} has no column {column!r}; it has {', '.join(sorted(columns))}. Name another.")
    return column


def _texts(
    dataset: StreamingDataset, column: str, on_share: OnShare
) -> Iterator[tuple[OpenedSource, int, int | None, str]]:
    """Yield source, row id, document and text of each row, or of each document of packs."""

    def wanted(source: OpenedSource) -> set[str]:
        if not source.num_rows:
            return set()
        is_pack = column not in (columns := columns_of(source)) and {"tokens", "spans"} <= columns
        return {"tokens", "spans"} if is_pack else {_known(source, column)}

    # A document whose next piece may follow.
    held: list[tuple[OpenedSource, int, int, list[NDArray[Any]]]] = []
    for part in every_row(dataset, wanted, on_share):
        if "spans" not in part.rows.columns:
            for row_id, text in zip(part.rows.row_ids.tolist(), part.rows.columns[column], strict=True):
                if not isinstance(text, str):
                    raise DataError(f"Row {row_id}: {column} is {type(text).__name__}, not text. Name another column.")
                yield part.source, row_id, None, text
            continue
        for row_id, document, offset, piece in _pieces(part):
            if held:
                source, first, last, pieces = held[0]
                if source is part.source and last == document and offset == sum(map(len, pieces)):
                    pieces.append(piece)
                    continue
                yield source, first, last, _decoded(pieces)
            held = [(part.source, row_id, document, [piece])]
    for source, first, last, pieces in held:
        yield source, first, last, _decoded(pieces)


def _pieces(part: RowsOfSource) -> Iterator[tuple[int, int, int, NDArray[Any]]]:
    columns = part.rows.columns
    for row_id, tokens, spans in zip(part.rows.row_ids.tolist(), columns["tokens"], columns["spans"], strict=True):
        if len(tokens) and int(np.max(tokens)) > _BYTES:
            raise DataError(
                f"{part.source.url} has packs of another tokenizer's tokens, whose text isn't known here. Ask data "
                "that hold the text."
            )
        for document, _, start, stop, offset in np.asarray(spans).tolist():
            yield row_id, document, offset, np.asarray(tokens[start:stop])


def _decoded(pieces: list[NDArray[Any]]) -> str:
    tokens = np.concatenate(pieces)
    return tokens[tokens < _BYTES].astype(np.uint8).tobytes().decode("utf-8", "replace")


def normalised(text: str) -> str:
    """Return a text as it's compared: Unicode's NFKC, lower case, white space made single."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def shingles(text: str) -> frozenset[str]:
    """Return all runs of nine characters of a normalised text; one that is shorter is its only one."""
    return frozenset(text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Return how many of both sets are in each, as a share of all."""
    return len(one & other) / len(one | other)


def sketch(text: str) -> Hashes:
    """Return the MinHash sketch of a normalised text's shingles, uint64 [bins].

    Two sketches are equal in a bin about as often as the texts' shingles are alike.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    letters = np.pad(letters, (0, max(0, SHINGLE - len(letters))))
    hashes = np.zeros(len(letters) - SHINGLE + 1, np.uint64)
    for place in range(SHINGLE):
        hashes = _mixed(hashes + letters[place : len(letters) - SHINGLE + 1 + place])
    bins = (hashes >> np.uint64(57)).astype(np.int64)
    found = np.full(NUM_BINS, np.iinfo(np.uint64).max)
    np.minimum.at(found, bins, hashes)
    empty, filled = np.ones(NUM_BINS, bool), found.copy()
    empty[bins] = False
    wanting, attempt = np.flatnonzero(empty), 1
    while len(wanting):
        given = (_mixed((wanting + attempt * NUM_BINS).astype(np.uint64)) >> np.uint64(57)).astype(np.int64)
        has = ~empty[given]
        filled[wanting[has]] = found[given[has]]
        wanting, attempt = wanting[~has], attempt + 1
    return filled


def _mixed(values: Hashes) -> Hashes:
    """Return well-mixed hashes of numbers: the last steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


def bands_for(threshold: float) -> int:
    """Return into how many bands a sketch is cut: as few as find 99.99 % of what is as like as the threshold."""
    for bins_per_band in (64, 32, 16, 8, 4, 2):
        bands = NUM_BINS // bins_per_band
        if 1 - (1 - threshold**bins_per_band) ** bands >= _RECALL:
            return bands
    return NUM_BINS


def difference_hash(
    data: Any,  # noqa: ANN401  (a file's bytes, or an image that is decoded already)
    name: str = "image",
) -> int:
    """Return the 64 bits of an image's difference hash.

    Raises:
        DataError: it can't be decoded.
    """
    pixels = decode_image(data, name=name).numpy().astype(np.float64)
    grey = np.tensordot([0.299, 0.587, 0.114], pixels, 1)
    # What differs by rounding alone is equal.
    small = np.round(_averaged(_averaged(grey, 8).T, 9).T, 6)
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


def _averaged(values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return means over `size` equal stretches of the first dimension, whose edges may lie within a pixel."""
    total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, 0)])
    edges = np.linspace(0, len(values), size + 1)
    whole = np.minimum(edges.astype(np.int64), len(values) - 1)
    at: NDArray[np.float64] = total[whole] + (edges - whole)[:, None] * values[whole]
    return np.diff(at, axis=0) * (size / len(values))
