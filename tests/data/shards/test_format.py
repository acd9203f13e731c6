"""MDS against its description: bytes written by hand, a reader of its own, round trips, and damage of every kind."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from cosmati.data.shards.compression import compress, decompress, extension
from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.index import Column, FileInfo, ShardInfo, dump_index, parse_index
from cosmati.data.shards.mds import CorruptShardError, MdsShard, encode_sample, encode_shard
from cosmati.errors import DataError
from tests.data.shards.mds_reader import read_shard

COLUMNS = (
    Column("id", "int", 8),
    Column("text", "str", None),
    Column("half", "float16", 2),
    Column("raw", "bytes", None),
)


def info_of(path: Path, columns: tuple[Column, ...], rows: int) -> ShardInfo:
    return ShardInfo(rows, columns, FileInfo(path.name, path.stat().st_size))


def by_hand() -> bytes:
    """Two rows: (258, "hé", 1.5, b"") and (-1, "", -2.0, b"xyz"), each byte from the format's description."""
    first = (
        b"\x03\x00\x00\x00"  # length of text: "hé" is three bytes of UTF-8
        b"\x00\x00\x00\x00"  # length of raw
        b"\x02\x01\x00\x00\x00\x00\x00\x00"  # id 258, little-endian
        b"h\xc3\xa9"
        b"\x00\x3e"  # 1.5 as a half: 0x3e00
    )
    second = b"\x00\x00\x00\x00\x03\x00\x00\x00" + b"\xff" * 8 + b"\x00\xc0" + b"xyz"
    header = b'{"any": "thing"}'  # readers pass over it
    start = 4 + 3 * 4 + len(header)
    offsets = [start, start + len(first), start + len(first) + len(second)]
    return b"\x02\x00\x00\x00" + struct.pack("<3I", *offsets) + header + first + second


def test_a_shard_written_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(by_hand())
    shard = MdsShard(path, info_of(path, COLUMNS, 2))
    assert shard.row(0) == {"id": 258, "text": "hé", "half": 1.5, "raw": b""}
    assert shard.row(1) == {"id": -1, "text": "", "half": -2.0, "raw": b"xyz"}
    rows = shard.rows(np.asarray([1, 0, 1]))
    assert rows["id"].tolist() == [-1, 258, -1]  # type: ignore[union-attr]
    assert rows["text"] == ["", "hé", ""]
    assert rows["raw"] == [b"xyz", b"", b"xyz"]


def test_our_shard_is_read_by_another_reader(tmp_path: Path) -> None:
    rows = [{"id": 258, "text": "hé", "half": 1.5, "raw": b""}, {"id": -1, "text": "", "half": -2.0, "raw": b"xyz"}]
    path = tmp_path / "ours.mds"
    path.write_bytes(encode_shard(COLUMNS, [encode_sample(COLUMNS, row) for row in rows]))
    hand = tmp_path / "hand.mds"
    hand.write_bytes(by_hand())
    sizes = [(column.name, column.size) for column in COLUMNS]
    assert read_shard(path, sizes) == read_shard(hand, sizes)


def test_a_dynamic_array_is_laid_out_as_described() -> None:
    array = np.asarray([[1, 2, 3]], np.int16)
    # dtype code 17, then 2 dimensions of a byte each (2 << 2 | 0), the shape, the values.
    assert encoding("ndarray").encode(array) == bytes([17, 2 << 2, 1, 3]) + b"\x01\x00\x02\x00\x03\x00"
    assert encoding("ndarray:int16").encode(array) == bytes([2 << 2, 1, 3]) + b"\x01\x00\x02\x00\x03\x00"
    assert encoding("ndarray:int16:1,3").encode(array) == b"\x01\x00\x02\x00\x03\x00"
    long = np.zeros((1, 300), np.uint8)
    assert encoding("ndarray").encode(long)[:6] == bytes([8, 2 << 2 | 1]) + struct.pack("<HH", 1, 300)


def picture(width: int = 3, height: int = 2) -> Image.Image:
    return Image.fromarray(np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3))


def test_images_are_laid_out_as_described() -> None:
    image = picture()
    raw = encoding("pil").encode(image)
    assert raw == struct.pack("<III", 3, 2, 3) + b"RGB" + bytes(range(18))
    assert encoding("pil").decode(memoryview(raw)).tobytes() == image.tobytes()
    png = encoding("png").encode(image)
    assert encoding("png").decode(memoryview(png)).tobytes() == image.tobytes()
    several = encoding("list[png]").encode([image, picture(1, 1)])
    assert struct.unpack_from("<II", several) == (0, 2)
    assert [one.size for one in encoding("list[png]").decode(memoryview(several))] == [(3, 2), (1, 1)]
    packed = encoding("jpeg_array").encode([image])
    assert struct.unpack_from("<I", packed) == (1,)
    stream = io.BytesIO()
    image.save(stream, format="JPEG")
    assert packed[8:] == encoding("jpeg").encode(stream.getvalue())


INTS = {f"{sign}int{bits}": (bits, sign) for bits in (8, 16, 32, 64) for sign in ("", "u")}
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=40),
    "str": st.text(max_size=40),
    "int": st.integers(-(2**63), 2**63 - 1),
    "str_int": st.integers(),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False, allow_infinity=False),
    "json": jsons,
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    **{
        name: st.integers(0 if sign else -(2 ** (bits - 1)), 2 ** (bits - (0 if sign else 1)) - 1)
        for name, (bits, sign) in INTS.items()
    },
}


@pytest.mark.parametrize("name", list(VALUES))
@settings(max_examples=25)
@given(data=st.data())
def test_values_come_back(name: str, data: st.DataObject) -> None:
    value, kind = data.draw(VALUES[name]), encoding(name)
    written = kind.encode(value)
    assert kind.size in (None, len(written))
    found = kind.decode(memoryview(written))
    assert found == value
    assert type(found) is type(value) or np.isscalar(found)


@pytest.mark.long
@given(
    hnp.arrays(hnp.integer_dtypes(endianness="?") | hnp.floating_dtypes(endianness="?"), hnp.array_shapes(max_dims=4))
)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    for name in (
        "ndarray",
        f"ndarray:{array.dtype.name}",
        f"ndarray:{array.dtype.name}:{','.join(map(str, array.shape))}",
    ):
        found = encoding(name).decode(memoryview(encoding(name).encode(array)))
        assert found.dtype == array.dtype.newbyteorder("<")
        assert np.array_equal(found, array, equal_nan=True)


def test_pickles_are_refused_unless_asked_for() -> None:
    with pytest.raises(DataError, match="allow_pickle=True if"):
        encoding("pkl")
    kind = encoding("pkl", allow_pickle=True)
    assert kind.decode(memoryview(kind.encode({1: "a"}))) == {1: "a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int8", 128),
        ("uint8", -1),
        ("int", 1.5),
        ("str", b"x"),
        ("bytes", "x"),
        ("str_decimal", 1.5),
        ("ndarray", np.float64(1)),
        ("ndarray", np.zeros((2, 0))),
        ("ndarray:int8:3", np.zeros(4, np.int8)),
        ("ndarray:int8", np.zeros(4, np.float32)),
        ("json", {1, 2}),
        ("pil", 3),
        ("png", 3),
        ("list[png]", 3),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: object) -> None:
    with pytest.raises(DataError, match="isn't"):
        encoding(name).encode(value)


@pytest.mark.parametrize("name", ["int128", "ndarray:text", "ndarray:int8:0", "list[gif]", "ndarray::3", ""])
def test_unknown_encodings_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"encoding|dtype|dimension"):
        encoding(name)


@pytest.mark.parametrize("name", ["br", "br:3", "bz2", "bz2:9", "gz", "gz:1", "snappy", "zstd", "zstd:19"])
@settings(max_examples=10)
@given(data=st.binary(max_size=3000))
def test_compression_comes_back_and_is_bounded(name: str, data: bytes) -> None:
    packed = compress(name, data)
    assert packed == compress(name, data)
    assert extension(name) == "." + name.split(":", maxsplit=1)[0]
    assert decompress(name, packed, max_bytes=len(data)) == data
    for damaged in (packed[:-1], b"", packed + b"more"):
        try:
            assert decompress(name, damaged, max_bytes=len(data)) == data
        except DataError:
            continue


@pytest.mark.parametrize("name", ["br", "bz2", "gz", "snappy", "zstd"])
def test_a_bomb_is_cut_off(name: str) -> None:
    packed = compress(name, bytes(50_000_000))
    with pytest.raises(DataError, match="become more"):
        decompress(name, packed, max_bytes=1000)


@pytest.mark.parametrize("name", ["lzma", "snappy:3", "zstd:23", "gz:10", "br:12", ""])
def test_unknown_compressions_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"compression|levels"):
        compress(name, b"")


rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(2**63), 2**63 - 1),
            "text": st.text(max_size=6),
            "half": st.sampled_from([0.0, 1.5, -2.0]),
            "raw": st.binary(max_size=6),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(rows=rows_of, data=st.data())
def test_batched_reads_equal_single_ones(rows: list[dict[str, Any]], data: st.DataObject, tmp_path: Path) -> None:
    columns = (
        *COLUMNS,
        Column("fixed", "ndarray:int32:2", 8),
        Column("free", "ndarray", None),
        Column("typed", "ndarray:uint8", None),
    )
    alike = data.draw(st.booleans())
    rows = [
        {
            **row,
            "fixed": np.asarray([n, -n], np.int32),
            "free": np.arange(3 if alike else n % 3 + 1, dtype=np.int64) + n,
            "typed": np.full((2, 2) if alike else (n % 2 + 1, 2), n, np.uint8),
        }
        for n, row in enumerate(rows)
    ]
    path = tmp_path / "shard.mds"
    path.write_bytes(encode_shard(columns, [encode_sample(columns, row) for row in rows]))
    shard = MdsShard(path, info_of(path, columns, len(rows)))
    chosen = np.asarray(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)), np.int64)
    found = shard.rows(chosen)
    for place, row in enumerate(chosen.tolist()):
        one = shard.row(row)
        for name, value in one.items():
            assert np.array_equal(found[name][place], value), name
            assert np.array_equal(value, rows[row][name]), name
    assert alike is False or not len(chosen) or isinstance(found["free"], np.ndarray)
    assert set(shard.rows(chosen, ["id", "free"])) == {"id", "free"}


def read_all(path: Path, rows: int) -> None:
    shard = MdsShard(path, info_of(path, COLUMNS, rows))
    shard.rows(np.arange(rows))
    for row in range(rows):
        shard.row(row)


def test_every_truncation_and_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    good, path = by_hand(), tmp_path / "shard.mds"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(DataError):
            read_all(path, 2)
    in_values = 0
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            read_all(path, 2)
        except DataError:
            continue
        # Structure can't tell a changed value from a right one; hashes do. Count, offsets and lengths are all found.
        assert bit // 8 >= 16
        in_values += 1
    assert in_values > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=80), rows=st.integers(0, 2**31))
def test_noise_is_never_read(data: bytes, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "noise.mds"
    path.write_bytes(data)
    try:
        shard = MdsShard(path, info_of(path, COLUMNS, rows))
    except DataError:
        return
    assert shard.num_rows <= len(data)


def test_a_damaged_value_names_shard_row_and_column(tmp_path: Path) -> None:
    data = by_hand().replace(b"h\xc3\xa9", b"h\xc3\x00")
    path = tmp_path / "shard.00007.mds"
    path.write_bytes(data)
    for read in (lambda s: s.row(0), lambda s: s.rows(np.asarray([1, 0]))):
        with pytest.raises(CorruptShardError, match=r"shard.00007.mds, row 0, column 'text'"):
            read(MdsShard(path, info_of(path, COLUMNS, 2)))


def test_a_row_with_other_columns_is_refused() -> None:
    with pytest.raises(DataError, match="has the columns id, where id, text, half, raw were due"):
        encode_sample(COLUMNS, {"id": 1})
    with pytest.raises(DataError, match="Column 'text'"):
        encode_sample(COLUMNS, {"id": 1, "text": 2, "half": 0.0, "raw": b""})


def index_json(**changes: Any) -> dict[str, Any]:
    shard = {
        "version": 2,
        "format": "mds",
        "samples": 2,
        "size_limit": 1 << 26,
        "column_names": ["id", "text"],
        "column_encodings": ["int", "str"],
        "column_sizes": [8, None],
        "compression": "zstd:7",
        "hashes": ["sha1", "xxh64"],
        "raw_data": {"basename": "a/shard.00000.mds", "bytes": 100, "hashes": {"sha1": "aa", "xxh64": "bb"}},
        "zip_data": {"basename": "a/shard.00000.mds.zstd", "bytes": 50, "hashes": {"sha1": "cc", "xxh64": "dd"}},
    }
    return {"version": 2, "shards": [{**shard, **changes}], "mine": {"x": [1]}}


def test_an_index_written_elsewhere_is_read() -> None:
    index = parse_index(json.dumps(index_json(), indent=2).encode(), name="index.json")
    assert (index.num_shards, index.num_rows, index.extra) == (1, 2, {"mine": {"x": [1]}})
    shard = index.shard(0)
    assert shard.columns == (Column("id", "int", 8), Column("text", "str", None))
    assert shard.raw == FileInfo("a/shard.00000.mds", 100, {"sha1": "aa", "xxh64": "bb"})
    assert shard.zip == FileInfo("a/shard.00000.mds.zstd", 50, {"sha1": "cc", "xxh64": "dd"})
    assert parse_index(dump_index([shard], index.extra), name="again").shard(0) == shard


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": 1}, "version"),
        ({"format": "json"}, "doesn.t name its files"),
        ({"format": "xml"}, "Invalid enum"),
        ({"hashes": ["md5", "xxh64"]}, "lacks a hash of md5"),
        ({"hashes": ["sha1", "sha1"]}, "repeat"),
        ({"samples": -1}, "samples"),
        ({"raw_data": {"basename": "../x", "bytes": 1, "hashes": {"sha1": "", "xxh64": ""}}}, "isn't below"),
        ({"raw_data": {"basename": "/etc/passwd", "bytes": 1, "hashes": {"sha1": "", "xxh64": ""}}}, "isn't below"),
        ({"raw_data": {"basename": "C:\\x", "bytes": 1, "hashes": {"sha1": "", "xxh64": ""}}}, "isn't below"),
        ({"raw_data": {"basename": "x", "bytes": 1 << 33, "hashes": {}}}, "bytes"),
        ({"raw_data": {"basename": "x", "bytes": 1, "hashes": {}}}, "lacks a hash"),
        ({"zip_data": None}, "name its files"),
        ({"column_sizes": [8]}, "don't match"),
        ({"column_sizes": [4, None]}, "has 8"),
        ({"column_encodings": ["int", "blob"]}, "no encoding"),
        ({"compression": "rar"}, "no compression"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_wrong_index_says_what_is_wrong(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        parse_index(json.dumps(index_json(**changes)).encode(), name="index.json")


def test_indices_that_arent_are_refused() -> None:
    for data in (b"", b"[]", b"{}", b'{"version": 3, "shards": []}', b"\xff", b'{"version": 2}', b"[" * 10_000):
        with pytest.raises(DataError):
            parse_index(data, name="index.json")


@given(st.binary(max_size=200) | jsons.map(lambda value: json.dumps(value).encode()))
def test_noise_is_no_index(data: bytes) -> None:
    with pytest.raises(DataError):
        parse_index(data, name="index.json")


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_flipped_bit_of_an_index_breaks_nothing(place: int, bit: int) -> None:
    data = bytearray(json.dumps(index_json()).encode())
    data[place % len(data)] ^= 1 << bit
    try:
        index = parse_index(bytes(data), name="index.json")
    except DataError:
        return
    assert index.num_shards == 1


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_many_shards_are_read_in_little_memory() -> None:
    import tracemalloc

    one = parse_index(json.dumps(index_json()).encode(), name="x").shard(0)
    assert one.zip is not None
    named = [
        dataclasses.replace(
            one, raw=FileInfo(f"{n}.mds", 100, one.raw.hashes), zip=FileInfo(f"{n}.z", 50, one.zip.hashes)
        )
        for n in range(20_000)
    ]
    data = dump_index(named, {})
    del named
    tracemalloc.start()
    index = parse_index(data, name="big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert index.num_shards == 20_000
    assert peak < 1200 * 20_000
    assert Decimal(index.num_rows) == 40_000
