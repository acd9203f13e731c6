"""Compression of whole shards, by the names of MDS: br, bz2, gz, snappy, zstd, some with `:level`.

Decompression is bounded: what a shard may become is known from its index, and nothing beyond it is ever allocated.
"""

from __future__ import annotations

import bz2
import re
import zlib
from typing import Any

from cosmati.errors import DataError, MissingExtraError

_NAME = re.compile(r"(br|bz2|gz|zstd)(?::(\d+))?|snappy")
_LEVELS = {"br": (0, 11, 11), "bz2": (1, 9, 9), "gz": (0, 9, 9), "zstd": (1, 22, 3)}
"""Lowest, highest and default level."""


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
    unpacker = bz2.BZ2Decompressor()
    found = unpacker.decompress(data, max_bytes + 1)
    return found if unpacker.eof and not unpacker.unused_data else None


def _gz(data: bytes, max_bytes: int) -> bytes | None:
    unpacker = zlib.decompressobj(31)
    found = unpacker.decompress(data, max_bytes + 1)
    return found if unpacker.eof and not unpacker.unused_data else None


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
    # A frame that knows its length is allocated whole, so the length is looked at first.
    if module.frame_content_size(data) > max_bytes:
        return None
    unpacker = module.ZstdDecompressor(max_window_size=1 << 31)
    return bytes(unpacker.decompress(data, max_output_size=max_bytes + 1, allow_extra_data=False))


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
