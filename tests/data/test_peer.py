"""Data sets that mosaicml-streaming wrote, read row by row; and ours, read by it where it's installed."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zstandard
from PIL import Image, ImageChops

from cosmati.data.loader import StreamingLoader
from cosmati.data.shards.compression import compress, decompress
from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.remote import EnvironmentFaultError
from cosmati.data.shards.writer import ShardWriter
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError
from tests.data.peer import rows as peer
from tests.data.peer.write import write as write_with_peer

# The peer writes no hashes, unless it's asked to.
pytestmark = pytest.mark.filterwarnings("ignore::cosmati.data.shards.opening.UnverifiedDataWarning")
WRITTEN = Path(__file__).parent / "peer" / "written"


def read(folder: Path, **options: Any) -> list[dict[str, Any]]:
    data = StreamingDataset(folder, shuffle=False, **options)
    return [data[n] for n in range(len(data))]


def same(found: object, wanted: object, *, lossy: bool = False) -> bool:
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(same(a, b, lossy=lossy) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, bytearray):
        return same(found, Image.open(io.BytesIO(wanted)))
    if isinstance(wanted, Image.Image):
        assert isinstance(found, Image.Image)
        off = ImageChops.difference(found, wanted).getextrema()
        return lossy or max(np.ravel(off)) == 0
    if isinstance(wanted, np.ndarray):
        return bool(np.array_equal(np.asarray(found), wanted))
    return bool(found == wanted)


def test_every_encoding_of_theirs_is_read() -> None:
    found = read(WRITTEN / "encodings")
    assert len(found) == 3
    for n, row in enumerate(found):
        for name, wanted in peer.row(n).items():
            assert same(row[name], wanted, lossy=name in ("jpeg", "jpegs")), name
        assert type(row["int"]) is int
        assert json.dumps({name: row[name] for name in ("int", "str", "json", "json_array", "str_int")})


@pytest.mark.parametrize("name", peer.HASHES)
def test_every_hash_of_theirs_is_checked(name: str, tmp_path: Path) -> None:
    folder = WRITTEN / "hashes" / name
    assert [row["text"] for row in read(folder)] == ["text 0", "text 1", "text 2"]
    (tmp_path / "index.json").write_bytes((folder / "index.json").read_bytes())
    content = bytearray((folder / "shard.00000.mds").read_bytes())
    content[-1] ^= 1
    (tmp_path / "shard.00000.mds").write_bytes(content)
    with pytest.raises(Exception, match=f"has {name} "):
        read(tmp_path)


@pytest.mark.parametrize("name", peer.COMPRESSIONS)
def test_every_compression_of_theirs_is_read(name: str, tmp_path: Path) -> None:
    folder = WRITTEN / "compression" / name.replace(":", "-")
    found = read(folder, cache=tmp_path)
    assert [{"number": row["number"], "text": row["text"]} for row in found] == [peer.few(n) for n in range(3)]


@pytest.mark.parametrize("name", peer.SPLITS)
def test_json_csv_tsv_and_xsv_shards_are_read(name: str, tmp_path: Path) -> None:
    for options in ({"cache": tmp_path}, {} if name in ("json", "csv", "tsv", "xsv") else {"cache": tmp_path}):
        found = read(WRITTEN / "split" / name, **options)
        assert [{key: row[key] for key in peer.SPLIT} for row in found] == [peer.split(n) for n in range(7)]
        assert {key: type(found[0][key]) for key in peer.SPLIT} == {"number": int, "text": str, "part": float}


def test_a_damaged_line_is_named_by_shard_and_row(tmp_path: Path) -> None:
    for kind, old, new in (("json", b'"part": 0.25', b'"part" ?0.25'), ("csv", b"-1,0.25,", b"-1;0.25,")):
        folder = tmp_path / kind
        shutil.copytree(WRITTEN / "split" / kind, folder)
        shard = folder / f"shard.00000.{kind}"
        shard.write_bytes(shard.read_bytes().replace(old, new))
        with pytest.raises(DataError, match=f"shard.00000.{kind} has a row 1 that can't be read"):
            read(folder)
        shard.with_name(f"{shard.name}.meta").write_bytes(b"\x07\0\0\0" + bytes(8))
        with pytest.raises(DataError, match=r"bytes where|offsets"):
            read(folder)


@pytest.mark.parametrize("name", ["json", "csv", "tsv", "xsv"])
def test_offsets_that_dont_hold_are_no_bad_rows(name: str, tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "split" / name, tmp_path / name)
    index = json.loads((tmp_path / name / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_meta"]["hashes"] = shard["raw_data"]["hashes"] = {}
    (tmp_path / name / "index.json").write_text(json.dumps(index))
    meta = next((tmp_path / name).glob("*00000*.meta"))
    flipped = bytearray(meta.read_bytes())
    flipped[9] ^= 0x80  # the second row now begins 32 KiB further on
    meta.write_bytes(flipped)
    data = StreamingDataset(tmp_path / name, columns=("number",), on_bad_row="skip")
    with pytest.raises(EnvironmentFaultError, match="offsets that don't rise"):
        list(StreamingLoader(data, 2))
    assert not data.skipped


def test_arrays_go_into_json_and_bytearrays_into_images() -> None:
    nested = {"a": np.asarray([[1, 2]]), "b": [np.float32(0.5), np.int64(3)]}
    assert json.loads(encoding("json").encode(nested)) == {"a": [[1, 2]], "b": [0.5, 3]}
    for name in ("jpegarray", "jpeg_array", "list[jpeg]"):
        files = [bytearray(peer.jpeg(0)), memoryview(peer.jpeg(1))]
        decoded = encoding(name).decode(memoryview(encoding(name).encode(files)))
        assert same(decoded, [bytearray(one) for one in files])


def test_a_jpeg_that_comes_as_a_file_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "one.jpg"
    peer.image(3).save(path, quality=30)
    kind = encoding("jpeg")
    assert kind.encode(Image.open(path)) == path.read_bytes()
    assert kind.encode(Image.open(io.BytesIO(path.read_bytes()))) == path.read_bytes()
    changed = Image.open(path)
    changed.thumbnail((4, 4))
    assert kind.encode(changed) != path.read_bytes()
    assert kind.decode(memoryview(kind.encode(changed))).size == (4, 3)


@pytest.mark.parametrize("name", ["gz", "bz2", "zstd"])
def test_several_streams_one_behind_the_other_are_read(name: str) -> None:
    parts = [b"one", b"", b"three" * 100]
    packed = b"".join(compress(name, part) for part in parts)
    whole = b"".join(parts)
    assert decompress(name, packed, max_bytes=len(whole)) == whole
    for wrong in (packed[:-1], packed + b"\1"):
        with pytest.raises(DataError, match="damaged"):
            decompress(name, wrong, max_bytes=len(whole))
    with pytest.raises(DataError, match="become more"):
        decompress(name, packed, max_bytes=len(whole) - 1)
    if name == "zstd":
        skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
        assert decompress(name, skipped + packed + skipped, max_bytes=len(whole)) == whole
        streamed = zstandard.ZstdCompressor(write_checksum=True).compressobj()
        unsized = streamed.compress(whole) + streamed.flush()
        assert decompress(name, unsized + packed, max_bytes=2 * len(whole)) == 2 * whole


@pytest.fixture(scope="module")
def streaming() -> ModuleType:
    """Return mosaicml-streaming, where it's installed."""
    return pytest.importorskip("streaming", exc_type=ImportError)


def write(out: Path, columns: dict[str, str], rows: list[dict[str, Any]], **options: Any) -> Path:
    with ShardWriter(out, columns, class_path="open/x", source="s", size_limit=600, **options) as writer:
        for row in rows:
            writer.write(row)
    return out


# It leaves its files open.
leaky = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@leaky
def test_they_read_every_encoding_of_ours(streaming: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, peer.COLUMNS, [peer.row(n) for n in range(3)])
    found = streaming.StreamingDataset(local=str(tmp_path), shuffle=False, batch_size=1)
    for n in range(3):
        for name, wanted in peer.row(n).items():
            assert same(found[n][name], wanted, lossy=name in ("jpeg", "jpegs")), name


@leaky
@pytest.mark.parametrize("hash_name", ["sha256", "sha3_384", "xxh3_128", "blake2b"])
@pytest.mark.parametrize("compression", [None, *peer.COMPRESSIONS])
def test_they_read_every_compression_and_hash_of_ours(
    streaming: ModuleType, compression: str | None, hash_name: str, tmp_path: Path
) -> None:
    rows = [peer.few(n) for n in range(40)]
    write(tmp_path / "ours", peer.FEW, rows, compression=compression, hashes=[hash_name])
    options = {"remote": str(tmp_path / "ours"), "local": str(tmp_path / "copy"), "validate_hash": hash_name}
    found = streaming.StreamingDataset(**options, shuffle=False, batch_size=1)
    assert [found[n] for n in range(40)] == rows


@leaky
def test_they_write_the_fixtures_still(streaming: ModuleType, tmp_path: Path) -> None:
    assert streaming.__version__.startswith("0.")
    write_with_peer(tmp_path)
    for path in sorted((WRITTEN / "hashes").rglob("*.*")) + sorted((WRITTEN / "split" / "xsv").iterdir()):
        assert (tmp_path / path.relative_to(WRITTEN)).read_bytes() == path.read_bytes(), path
