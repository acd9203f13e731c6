"""A reader of MDS written from the format's description alone: slow, and shares nothing with the library."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path


def read_shard(path: Path, columns: list[tuple[str, int | None]]) -> list[dict[str, bytes]]:
    """Return every row's raw values by column; sizes are None where they vary."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data, 0)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    assert offsets[-1] == len(data)
    rows = []
    for start, stop in itertools.pairwise(offsets):
        sizes, at = [], start
        for _, size in columns:
            if size is None:
                sizes.append(struct.unpack_from("<I", data, at)[0])
                at += 4
            else:
                sizes.append(size)
        values = {}
        for (name, _), size in zip(columns, sizes, strict=True):
            values[name] = data[at : at + size]
            at += size
        assert at == stop
        rows.append(values)
    return rows


def read_source(folder: Path) -> list[dict[str, bytes]]:
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    rows = []
    for shard in index["shards"]:
        columns = list(zip(shard["column_names"], shard["column_sizes"], strict=True))
        path = folder / shard["raw_data"]["basename"]
        assert path.stat().st_size == shard["raw_data"]["bytes"]
        found = read_shard(path, columns)
        assert len(found) == shard["samples"]
        rows += found
    return rows
