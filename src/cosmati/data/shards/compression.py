"""Compression of whole shards, by the names of MDS: br, bz2, gz, snappy, zstd, some with `:level`.

Decompression is bounded: what a shard may become is known from its index, and nothing beyond it is ever allocated.
"""

from __future__ import annotations

import bz2
import re
import zlib
from collections.abc import Callable
from typing import Any

from cosmati.errors import DataError, MissingExtraError

_NAME = re.compile(r"(br|bz2|gz|zstd)(?::(\d+))?|snappy")
_LEVELS = {"br": (0, 11, 11), "bz2": (1, 9, 9), "gz": (0, 9, 9), "zstd": (1, 22, 3)}
"""Lowest, highest and default level."""
_SKIPPABLE_ZSTD_FRAME = 0x184D2A5
_LONGEST_ZSTD_HEADER = 18


def parse_compression(name: str) -> tuple[str, int | None]:
    """Return algorithm and level of a compression's name.

    Raises:
        DataError: there is no such compression, or no such level of it.
    """
    match = _NAME.fullmatch(name)
    if not match:
        msg = f"{name!r} is no compression of MDS. There are br, bz2, gz, zstd, each also with :level, and snappy."
        raise DataError(msg)
    algorithm = match[1] or "snappy"
    if algorithm == "snappy":
        return algorithm, None
    low, high, default = _LEVELS[algorithm]
    level = default if match[2] is None else int(match[2])
    if not low <= level <= high:
        raise DataError(f"{name!r}: {algorithm} has the levels {low} to {high}.")
    return algorithm, level


def extension(name: str | None) -> str:
    """Return what a compression adds to a file's name: `.zstd`, or nothing."""
    return "" if name is None else f".{parse_compression(name)[0]}"


def compress(name: str, data: bytes) -> bytes:
    """Return compressed data; the same bytes each time."""
    algorithm, level = parse_compression(name)
    if algorithm == "bz2":
        return bz2.compress(data, level or 9)
    if algorithm == "gz":
        # A gzip header holds the time, unless told; the raw window size of 31 asks zlib for a gzip stream without it.
        packer = zlib.compressobj(9 if level is None else level, zlib.DEFLATED, 31)
        return packer.compress(data) + packer.flush()
    module = _module(algorithm)
    if algorithm == "br":
        return bytes(module.compress(data, quality=level))
    if algorithm == "zstd":
        return bytes(module.ZstdCompressor(level=level).compress(data))
    return bytes(module.compress(data))


def decompress(name: str, data: bytes | memoryview, *, max_bytes: int) -> bytes:
    """Return decompressed data.

    Args:
        name: of the compression.
        data: the compressed bytes.
        max_bytes: what they may become at most.

    Raises:
        DataError: they aren't of this compression, are damaged, or would become more.
    """
    algorithm, _ = parse_compression(name)
    try:
        found = _DECOMPRESS[algorithm](bytes(data), max_bytes)
    except (DataError, MissingExtraError):
        raise
    except Exception as error:
        # Each package has an exception of its own for damaged input.
        raise DataError(f"{len(data)} bytes can't be decompressed as {name}: {error}. They're damaged.") from error
    if found is None or len(found) > max_bytes:
        raise DataError(f"{len(data)} bytes of {name} are damaged, or become more than {max_bytes} bytes.")
    return found


def _bz2(data: bytes, max_bytes: int) -> bytes | None:
    return _streams(data, max_bytes, bz2.BZ2Decompressor)


def _gz(data: bytes, max_bytes: int) -> bytes | None:
    # Zeros may follow the last member, as tapes leave them.
    return _streams(data, max_bytes, lambda: zlib.decompressobj(31), padding=b"\0")


def _streams(data: bytes, max_bytes: int, opened: Callable[[], Any], padding: bytes = b"") -> bytes | None:
    """Return what streams one behind the other hold, None where one isn't whole or they hold too much."""
    found, rest = bytearray(), data
    while True:
        unpacker = opened()
        found += unpacker.decompress(rest, max_bytes + 1 - len(found))
        if not unpacker.eof or len(found) > max_bytes:
            return None
        rest = unpacker.unused_data.lstrip(padding)
        if not rest:
            return bytes(found)


def _br(data: bytes, max_bytes: int) -> bytes | None:
    unpacker = _module("br").Decompressor()
    found, rest = bytearray(), data
    # output_buffer_limit came with brotli 1.2; without it a chunk of input is bounded by what it may expand to.
    while rest or not unpacker.is_finished():
        piece, rest = rest[:4096], rest[4096:]
        found += unpacker.process(piece)
        if len(found) > max_bytes or (not rest and not unpacker.is_finished()):
            return None
        if unpacker.is_finished() and rest:
            return None
    return bytes(found)


def _zstd(data: bytes, max_bytes: int) -> bytes | None:
    module = _module("zstd")
    unpacker = module.ZstdDecompressor(max_window_size=1 << 31)
    found, start = bytearray(), 0
    while start < len(data):
        stop, holds_data = _frame(module, data, start)
        frame, left = data[start:stop], max_bytes - len(found)
        # A frame that knows its length is allocated whole, so the length is looked at first.
        if stop > len(data) or (holds_data and module.frame_content_size(frame) > left):
            return None
        if holds_data:
            found += unpacker.decompress(frame, max_output_size=left + 1, allow_extra_data=False)
        start = stop
    return bytes(found) if data else None


def _frame(module: Any, data: bytes, start: int) -> tuple[int, bool]:  # noqa: ANN401  (a module)
    """Return where the Zstandard frame ends that starts here, and whether it holds data (RFC 8878)."""
    if int.from_bytes(data[start : start + 4], "little") >> 4 == _SKIPPABLE_ZSTD_FRAME:
        return start + 8 + int.from_bytes(data[start + 4 : start + 8], "little"), False
    head = data[start : start + _LONGEST_ZSTD_HEADER]
    place, is_last = start + module.frame_header_size(head), False
    while not is_last and place < len(data):
        block = int.from_bytes(data[place : place + 3], "little")
        is_last, is_run = bool(block & 1), block >> 1 & 3 == 1
        place += 3 + (1 if is_run else block >> 3)
    checksum = 4 if module.get_frame_parameters(head).has_checksum else 0
    return (place + checksum if is_last else len(data) + 1), True


def _snappy(data: bytes, max_bytes: int) -> bytes | None:
    # The first bytes of a raw block say how long it becomes, as a varint.
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return bytes(_module("snappy").decompress(data)) if size <= max_bytes else None


_DECOMPRESS = {"bz2": _bz2, "gz": _gz, "br": _br, "zstd": _zstd, "snappy": _snappy}


def _module(algorithm: str) -> Any:  # noqa: ANN401  (a module)
    try:
        if algorithm == "br":
            import brotli

            return brotli
        if algorithm == "zstd":
            import zstandard

            return zstandard
        from cramjam import snappy
    except ImportError as error:
        msg = f"Shards compressed with {algorithm} need another package: pip install 'cosmati[streaming]'."
        raise MissingExtraError(msg) from error

    class Raw:
        compress = staticmethod(snappy.compress_raw)
        decompress = staticmethod(snappy.decompress_raw)

    return Raw
