"""Small data sets of shards for tests: each row says which one it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cosmati.data.shards.compression import compress, extension
from cosmati.data.shards.index import Column, FileInfo, ShardInfo, dump_index
from cosmati.data.shards.mds import encode_sample, encode_shard
from cosmati.storage.lock import FileLock

COLUMNS = (Column("number", "int", 8), Column("tokens", "ndarray:int64:6", 48), Column("name", "str", None))


def write_source(
    folder: Path, rows: Sequence[int], *, class_path: str | None = None, first: int = 0, compression: str | None = None
) -> Path:
    """Write a source whose shards have `rows` rows; row number n holds first + n."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, number = [], first
    for shard, count in enumerate(rows):
        samples = []
        for _ in range(count):
            values = {"number": number, "tokens": np.arange(6) + number, "name": f"row {number}"}
            samples.append(encode_sample(COLUMNS, values))
            number += 1
        raw = encode_shard(COLUMNS, samples)
        info = FileInfo(f"shard.{shard:05d}.mds", len(raw), {"sha256": hashlib.sha256(raw).hexdigest()})
        if compression is None:
            (folder / info.basename).write_bytes(raw)
            shards.append(ShardInfo(count, COLUMNS, info))
            continue
        packed = compress(compression, raw)
        name = info.basename + extension(compression)
        (folder / name).write_bytes(packed)
        zipped = FileInfo(name, len(packed), {"sha256": hashlib.sha256(packed).hexdigest()})
        shards.append(ShardInfo(count, COLUMNS, info, zipped, compression))
    extra = {} if class_path is None else {"cosmati": {"class": class_path}}
    (folder / "index.json").write_bytes(dump_index(shards, extra))
    return folder


def write_data_set(folder: Path, classes: dict[str, Sequence[int]]) -> Path:
    """Write one source for each class, rows numbered through, and `sources.json`."""
    entries, first = [], 0
    for path, rows in classes.items():
        source = write_source(folder / path, rows, class_path=path, first=first)
        digest = hashlib.sha256((source / "index.json").read_bytes()).hexdigest()
        entries.append({"path": path, "class": path, "index_sha256": digest})
        first += sum(rows)
    (folder / "sources.json").write_text(json.dumps({"version": 1, "sources": entries}))
    return folder


def bytes_on_disk(cache: Path) -> int:
    """Return the bytes of all files of a cache at one moment: nothing is evicted or begun while they're counted."""
    found: dict[int, int] = {}  # by inode: what is being renamed may be seen by both names
    with FileLock(cache / ".budget", wait=True):
        for folder, _, names in os.walk(cache):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))  # noqa: PTH118
                    found[status.st_ino] = status.st_size
    return sum(found.values())
