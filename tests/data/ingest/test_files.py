"""Files are found in one order, cut at any separator as `split` does it, and hashed as they lie."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import random
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cosmati.data.ingest import files
from cosmati.data.ingest.files import cut, list_files, read_records
from cosmati.data.ingest.rows import Reading
from cosmati.errors import DataError

CONTENT = b"one\ntwo\n\nlast"
RECORDS = [(1, b"one"), (2, b"two"), (3, b""), (4, b"last")]


def split_oracle(content: bytes, separator: bytes, max_bytes: int) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    parts = content.split(separator)
    if parts[-1] == b"":
        parts.pop()
    before = b""
    for part in parts:
        found.append((1 + before.count(b"\n"), part if len(part) <= max_bytes else None))
        before += part + separator
    return found


@pytest.mark.long
@example(content=b"a\n" * 10 + b"<>a", separator=b"<>", max_bytes=2, chunk=1)
@given(
    content=st.lists(st.sampled_from([b"a", b"\n", b"<", b">", b"<>"]), max_size=60).map(b"".join),
    separator=st.sampled_from([b"\n", b"\n\n", b"<>", b"a<", b"<><>"]),
    max_bytes=st.integers(0, 12),
    chunk=st.integers(1, 9),
)
def test_cutting_is_splitting_for_every_chunk_and_bound(
    content: bytes, separator: bytes, max_bytes: int, chunk: int
) -> None:
    with mock.patch.object(files, "_CHUNK_BYTES", chunk):
        found = list(cut(io.BytesIO(content), separator, max_bytes))
    assert found == split_oracle(content, separator, max_bytes)


@pytest.mark.usefixtures("alone")
def test_a_record_beyond_the_bound_is_never_held_in_memory() -> None:
    class Endless(io.RawIOBase):
        """A line of 64 MiB, whose longest held part would show in the chunks asked for."""

        left = 64

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return b"x" * size if self.left >= 0 else b""

    import tracemalloc

    tracemalloc.start()
    found = list(cut(Endless(), b"\n", 1 << 20))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, None)]
    assert peak < 8 << 20


def compress_zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra `streaming` isn't installed")
    half = len(content) // 2
    packer = zstandard.ZstdCompressor(write_checksum=True)
    return b"".join(packer.compress(part) for part in (content[:half], b"", content[half:]))


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": compress_zstd}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_read_alike_and_are_hashed_as_they_lie(suffix: str, tmp_path: Path) -> None:
    stored = PACKERS[suffix](CONTENT)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(stored)
    reading = Reading("raise")
    assert list(read_records("a", path, reading, separator=b"\n", max_bytes=100)) == RECORDS
    assert [(f.num_bytes, f.sha256) for f in reading.files] == [(len(stored), hashlib.sha256(stored).hexdigest())]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("harm", ["cut off", "flipped"])
def test_damage_is_raised_or_recorded(suffix: str, harm: str, tmp_path: Path) -> None:
    content = b"".join(b"%d\n" % (i * i) for i in range(2000))
    stored = bytearray(PACKERS[suffix](content))
    if harm == "cut off":
        del stored[len(stored) // 2 :]
    else:
        stored[len(stored) // 2] ^= 0xFF
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(stored)
    with pytest.raises(DataError, match=r"a, \d+: the file is damaged"):
        list(read_records("a", path, Reading("raise"), separator=b"\n", max_bytes=100))
    reading = Reading("record")
    rows = list(read_records("a", path, reading, separator=b"\n", max_bytes=100))
    assert [row.file for row in reading.skipped] == ["a"]
    assert len(rows) < 2000
    assert reading.files[0].sha256 == hashlib.sha256(stored).hexdigest()


@pytest.mark.long
def test_a_damaged_file_is_hashed_whole(tmp_path: Path) -> None:
    stored = bytearray(bz2.compress(random.Random(0).randbytes(3 << 20)))  # blocks of 900 kB, each with a checksum
    stored[1000:1100] = bytes(100)
    path = tmp_path / "a.bz2"
    path.write_bytes(stored)
    reading = Reading("record")
    assert sum(len(record) for _, record in read_records("a", path, reading, separator=b"\n", max_bytes=100)) < 3 << 20
    assert len(reading.skipped) > 0
    assert reading.files[0].sha256 == hashlib.sha256(stored).hexdigest()
    assert reading.files[0].num_bytes == len(stored)


def test_order_is_by_name_in_bytes_and_names_are_relative(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a-b.txt", "B.TXT", "é.txt", "a/skip.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [name for name, _ in list_files(tmp_path, [".txt"])]
    assert names == ["B.TXT", "a-b.txt", "a/z.txt", "b.txt", "é.txt"]
    assert [n for n, _ in list_files([tmp_path / "b.txt", tmp_path / "a"], [".txt"])] == ["b.txt", "a/z.txt"]
    assert [n for n, _ in list_files(tmp_path / "a" / "z.txt", [".txt"])] == ["z.txt"]


def test_nothing_and_the_same_twice_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="named twice"):
        list_files([tmp_path, tmp_path / "a.txt"], [".txt"])
    with pytest.raises(DataError, match=r"no file that ends in \.jsonl"):
        list_files(tmp_path, [".jsonl"])
    with pytest.raises(DataError, match="doesn't exist"):
        list_files(tmp_path / "b.txt", [".txt"])
    with pytest.raises(DataError, match="No path"):
        list_files([], [".txt"])
