"""Tells rows that a data set has already by the records they were read from, where an input came back with other bytes.

An input that grew, or was compressed since, is another file by its digest, and its rows are the old ones. Another file
that happens to have the same name has other rows, and is welcome.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cosmati.data.shards.cache import ShardCache
from cosmati.data.shards.commitment import uncompressed_name
from cosmati.data.shards.formats import open_shard
from cosmati.data.shards.index import parse_index
from cosmati.data.shards.upload import Target

Record = tuple[str, int, bytes]
"""Name of the file, place in it, and SHA-256 of a record."""

_COLUMNS = {"origin_file", "origin_place", "origin_sha256", "origins"}
_MAX_BYTES = 1 << 30


def records_of(row: Mapping[str, Any]) -> list[Record]:
    """Return the records that a row was made of; none where it doesn't say."""
    if "origins" in row:  # a pack
        return [(file, place, bytes.fromhex(sha256)) for file, place, sha256 in row["origins"]]
    if {"origin_file", "origin_place", "origin_sha256"} <= row.keys():
        return [(row["origin_file"], int(row["origin_place"]), bytes(row["origin_sha256"]))]
    return []


def digests_of_files(source: Target, names: set[str]) -> set[bytes] | None:
    """Return the digests of a source's records that came from some files; None if its rows don't say.

    Args:
        source: its directory; a remote one's shards are fetched, each in turn.
        names: of the files, without the suffix of a compression.
    """
    index = parse_index(source.read("index.json", max_bytes=_MAX_BYTES), name=f"{source.url}/index.json")
    found: set[bytes] = set()
    for number in range(index.num_shards):
        with tempfile.TemporaryDirectory() as folder:
            store = ShardCache(source.local or Path(folder), None if source.local else source)
            shard = open_shard(store, index.shard(number), allow_pickle=True)
            rows = shard.rows(np.arange(shard.num_rows), _COLUMNS)
        for row in _by_row(rows, shard.num_rows):
            records = records_of(row)
            if not records:
                return None
            found.update(digest for file, _, digest in records if uncompressed_name(file) in names)
    return found


def _by_row(columns: Mapping[str, Any], num_rows: int) -> Iterator[dict[str, Any]]:
    return ({name: values[row] for name, values in columns.items()} for row in range(num_rows))
