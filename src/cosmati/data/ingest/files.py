"""Files with several rows: found in one order, cut into records with bounded memory, hashed as they lie."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from os.path import commonpath
from pathlib import Path
from typing import Any, BinaryIO

from cosmati.data.ingest.rows import OriginFile, Reading
from cosmati.errors import DataError, MissingExtraError

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

MAX_RECORD_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
_ZSTD_PIECE_BYTES = 1 << 10  # a block of 4 bytes may hold 128 KiB, so this holds 32 MiB at most
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def list_files(paths: Paths, suffixes: Sequence[str]) -> list[tuple[str, Path]]:
    """Find files: those named, and those with one of the suffixes anywhere below directories that are named.

    Args:
        paths: one path or several; a directory's files come in the order of their names' bytes.
        suffixes: such as `.txt`, compared in lower case; `""` takes every file.

    Returns:
        Name and path of each file. Names are relative to the directory, if it's the only path; otherwise to
        the deepest directory that holds all paths.

    Raises:
        DataError: a path doesn't exist, a directory has no such file, or a file comes twice.
    """
    given = [Path(p).expanduser() for p in ([paths] if isinstance(paths, str | PathLike) else paths)]
    if not given:
        raise DataError("No path is given. Name a file or a directory.")
    found: list[Path] = []
    for place in given:
        if not place.exists():
            raise DataError(f"{place} doesn't exist.")
        below = _below(place, tuple(suffixes)) if place.is_dir() else [place]
        if not below:
            raise DataError(f"{place} holds no file that ends in {', '.join(suffixes)}. Name the files themselves.")
        found += below
    resolved = [p.resolve() for p in found]
    if len(set(resolved)) < len(resolved):
        twice = next(p for p in resolved if resolved.count(p) > 1)
        raise DataError(f"{twice} is named twice, and its rows would be too. Name paths that don't overlap.")
    one = given[0] if len(given) == 1 and given[0].is_dir() else None
    root = one or Path(commonpath([p.absolute().parent for p in found]))
    base = root.absolute()
    return [(p.absolute().relative_to(base).as_posix(), p) for p in found]


def file_digests(files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """Return SHA-256 in hex of files as they lie, by their names.

    Raises:
        DataError: one can't be read.
    """
    found = {}
    for name, path in files:
        try:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}. Look at it, or leave it out.") from error
    return found


def _below(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files = [p for p in directory.rglob("*") if p.name.lower().endswith(suffixes) and p.is_file()]
    return sorted(files, key=lambda p: p.relative_to(directory).as_posix().encode("utf-8", "surrogateescape"))


def read_records(
    name: str, file: Path, reading: Reading, *, separator: bytes | None, max_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Cut a file into records; `.gz`, `.bz2`, `.xz` and `.zst` are decompressed on the way.

    Memory is bounded by `max_bytes` and a chunk. The file is read to its end and listed in `reading.files`. Records
    that are too long, and the rest of a damaged file, go to `reading`.

    Args:
        name: the file's name in messages and origins.
        file: where it lies.
        reading: takes what is wrong, and the file's digest.
        separator: ends a record; None takes the whole file as one.
        max_bytes: longest record.

    Yields:
        The line on which a record begins, from 1, and its bytes, without the separator.

    Raises:
        DataError: something is wrong, and `reading` says to raise.
        MissingExtraError: a `.zst` file, and zstandard isn't installed.
    """
    line = 1
    with file.open("rb") as plain:
        hashed = _HashedFile(plain)
        stream, damage = _decompressed(file, hashed)
        try:
            for line, record in cut(stream, separator, max_bytes):
                if record is None:
                    reading.reject(name, line, f"longer than {max_bytes} bytes; raise max_row_bytes to take it")
                else:
                    yield line, record
        except damage as error:
            reason = f"the file is damaged at or after this line, and its rest isn't read ({error})"
            reading.reject(name, line, reason, error)
        while hashed.read(_CHUNK_BYTES):  # what lies behind the compressed data counts too
            pass
    reading.files.append(OriginFile(name, hashed.num_bytes, hashed.sha256.hexdigest()))


def cut(stream: BinaryIO, separator: bytes | None, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Cut a stream at each separator, from left to right.

    Yields:
        The line on which a record begins and its bytes; None for one of more than `max_bytes`. An empty record at
        the very end is none.
    """
    if separator is None:
        whole = stream.read(max_bytes + 1)
        yield 1, whole if len(whole) <= max_bytes else None
        return
    buffer, line, newlines, too_long = bytearray(), 1, 0, False
    while chunk := stream.read(_CHUNK_BYTES):
        searched = max(0, len(buffer) - len(separator) + 1)
        buffer += chunk
        start = 0
        while (end := buffer.find(separator, max(start, searched))) >= 0:
            record = bytes(buffer[start:end])
            yield line, None if too_long or len(record) > max_bytes else record
            line += newlines + record.count(b"\n") + separator.count(b"\n")
            start, newlines, too_long = end + len(separator), 0, False
        del buffer[:start]
        if len(buffer) > max_bytes + len(separator):
            # What a separator may still begin with stays.
            cut_at = len(buffer) - len(separator) + 1
            newlines += buffer.count(b"\n", 0, cut_at)
            del buffer[:cut_at]
            too_long = True
    if buffer or too_long:
        yield line, None if too_long or len(buffer) > max_bytes else bytes(buffer)


class _HashedFile(io.RawIOBase):
    """A file that hashes what is read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  (any writable buffer: the standard library's contract)
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.sha256.update(data)
        self.num_bytes += len(data)
        return len(data)


def _decompressed(file: Path, raw: _HashedFile) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """Return a stream of a file's content, and what it raises where the file is damaged."""
    buffered: Any = io.BufferedReader(raw, _CHUNK_BYTES)
    suffix = file.suffix.lower()
    if suffix == ".zst":
        return _zstd(file, buffered)
    openers: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers[suffix](buffered) if suffix in openers else buffered, _DAMAGE


def _zstd(file: Path, buffered: BinaryIO) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    try:
        import zstandard
    except ImportError as error:
        msg = f"{file} is compressed with zstd, and zstandard isn't installed. Run: pip install 'cosmati[streaming]'"
        raise MissingExtraError(msg) from error
    frames: Any = _ZstdFrames(buffered, zstandard.ZstdDecompressor().decompressobj)
    return io.BufferedReader(frames, _CHUNK_BYTES), (*_DAMAGE, zstandard.ZstdError)


class _ZstdFrames(io.RawIOBase):
    """The content of zstd frames. The package's own stream takes a file that breaks off for one that ends."""

    def __init__(self, source: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._source = source
        self._new_frame = new_frame
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  (any writable buffer: the standard library's contract)
        while not self._ready:
            piece = self._source.read(_ZSTD_PIECE_BYTES)
            if not piece and self._frame is None:
                return 0
            if not piece:
                raise EOFError("it breaks off within a zstd frame")
            content = bytearray()
            while piece:
                self._frame = self._frame or self._new_frame()
                content += self._frame.decompress(piece)
                piece = self._frame.unused_data if self._frame.eof else b""
                self._frame = None if self._frame.eof else self._frame
            self._ready = memoryview(content)
        num = min(len(buffer), len(self._ready))
        buffer[:num] = self._ready[:num]
        self._ready = self._ready[num:]
        return num
