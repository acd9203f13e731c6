"""Rows gathered from several shards at once are those that each shard gives one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.gathering import rows_together
from cosmati.data.shards.index import Column, FileInfo, ShardInfo, dump_index
from cosmati.data.shards.mds import CorruptShardError, MdsShard, encode_sample, encode_shard
from cosmati.data.streaming import StreamingDataset

KINDS = {
    "number": "int",
    "text": "str",
    "data": "bytes",
    "fixed": "ndarray:int16:3",
    "shaped": "ndarray:float32",
    "free": "ndarray",
    "json": "json",
}
COLUMNS = tuple(Column(name, kind, encoding(kind).size) for name, kind in KINDS.items())


def row(number: int, *, length: int, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "number": number,
        "text": "é" * length,
        "data": bytes([number % 256]) * length,
        "fixed": np.arange(3, dtype=np.int16) + number,
        "shaped": np.full(shape, number, np.float32),
        "free": np.full(shape, number, np.int64),
        "json": {"n": [number] * length},
    }


def write_shard(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> tuple[MdsShard, ShardInfo]:
    raw = encode_shard(COLUMNS, [encode_sample(COLUMNS, one) for one in rows])
    (folder / name).write_bytes(raw)
    info = ShardInfo(len(rows), COLUMNS, FileInfo(name, len(raw), {"sha256": hashlib.sha256(raw).hexdigest()}))
    return MdsShard(folder / name, info), info


def assert_same(found: dict[str, Any], place: int, due: dict[str, Any]) -> None:
    assert found.keys() == due.keys()
    for name, value in due.items():
        got = found[name][place]
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype
            assert got.shape == value.shape
            assert (got == value).all()
        else:
            assert got == value, name


@settings(max_examples=40, deadline=None)
@given(data=st.data(), unlike=st.booleans(), mapped=st.booleans())
def test_gathered_rows_are_the_shards_own(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, unlike: bool, mapped: bool
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    number, shards = 0, []
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        rows = []
        for _ in range(data.draw(st.integers(1, 5))):
            shape = (int(draw.integers(1, 4)),) if unlike else (2, 2)
            rows.append(row(number, length=int(draw.integers(0, 4)) if unlike else 3, shape=shape))
            number += 1
        shard = write_shard(folder, f"{name}.mds", rows)[0]
        shards.append(shard if mapped else shard.unmapped())
    every = [(shard, index) for shard in shards for index in range(shard.num_rows)]
    chosen = [every[int(i)] for i in draw.integers(0, len(every), data.draw(st.integers(1, 12)))]
    parts = []
    for shard in shards:
        places = np.asarray([place for place, (own, _) in enumerate(chosen) if own is shard], np.int64)
        if len(places):
            parts.append((places, shard, np.asarray([chosen[place][1] for place in places], np.int64)))
    found = rows_together(parts)
    for place, (shard, index) in enumerate(chosen):
        assert_same(found, place, shard.row(index))
    some = rows_together(parts, ("text", "fixed"))
    assert some.keys() == {"text", "fixed"}
    assert list(some["text"]) == list(found["text"])


def test_what_was_gathered_outlives_the_shards(tmp_path: Path) -> None:
    written = [row(number, length=3, shape=(2, number % 2 + 1)) for number in range(6)]
    shards = [write_shard(tmp_path, f"{n}.mds", written[3 * n : 3 * n + 3])[0] for n in range(2)]
    found = rows_together([(np.arange(3) + 3 * n, shard, np.arange(3)) for n, shard in enumerate(shards)])
    del shards
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    for place, due in enumerate(written):
        assert_same(found, place, due)
    for column in found.values():
        for value in column:
            if isinstance(value, np.ndarray):
                value[...] = 7  # who reads rows may change them


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("text", b"\xff\xff", r"shard.00001.mds, row 2, column 'text'"),
        (None, b"\xff\xff", r"shard.00001.mds has a row 2 whose values"),
        (None, b"\x00\x00", r"shard.00001.mds has a row 2 whose values"),
    ],
)
def test_a_bad_row_among_several_shards_is_named(
    tmp_path: Path, column: str | None, value: bytes, message: str
) -> None:
    infos = []
    for shard in range(3):
        rows = [row(4 * shard + n, length=3, shape=(2,)) for n in range(4)]
        infos.append(write_shard(tmp_path, f"shard.{shard:05d}.mds", rows)[1])
    path = tmp_path / "shard.00001.mds"
    raw = bytearray(path.read_bytes())
    start = int.from_bytes(raw[4 + 4 * 2 : 8 + 4 * 2], "little")
    lengths = 4 * sum(one.size is None for one in COLUMNS)
    at = start if column is None else start + lengths + 8
    raw[at : at + 2] = value
    path.write_bytes(raw)
    hashes = {"sha256": hashlib.sha256(raw).hexdigest()}
    infos[1] = ShardInfo(4, COLUMNS, FileInfo(path.name, len(raw), hashes))
    (tmp_path / "index.json").write_bytes(dump_index(infos, {}))
    data = StreamingDataset(tmp_path, shuffle=False)
    with pytest.raises(CorruptShardError, match=message):
        data.read(data.locate(range(12)))
    assert data.read(data.locate([0, 5, 11])).columns["number"] == pytest.approx([0, 5, 11])
