"""Files of a C2SP tlog-tiles log: paths, tiles of hashes, bundles of entries."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.tree import TreeHead, merge

TILE_WIDTH = 256
HASH_SIZE = 32
ENTRIES = "entries"
_LENGTH = struct.Struct(">H")


def tile_path(level: int | str, index: int, width: int = TILE_WIDTH) -> str:
    """Return the path of a tile below the log's directory; level `ENTRIES` means a bundle of entries.

    >>> tile_path(0, 1234067, 8)
    'tile/0/x001/x234/067.p/8'
    """
    digits = str(index)
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    parts = [digits[i : i + 3] for i in range(0, len(digits), 3)]
    name = "/".join([*("x" + part for part in parts[:-1]), parts[-1]])
    return f"tile/{level}/{name}" + ("" if width == TILE_WIDTH else f".p/{width}")


def encode_bundle(entries: Iterable[bytes]) -> bytes:
    """Return entries as one bundle, each after its length (uint16, big-endian)."""
    return b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries)


def decode_bundle(data: bytes) -> list[bytes]:
    """Return the entries of a bundle.

    Raises:
        TamperError: the bytes end inside an entry.
    """
    entries: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + _LENGTH.size
        end = start + _LENGTH.unpack(data[position:start])[0] if start <= len(data) else len(data) + 1
        if end > len(data):
            raise TamperError(f"it ends inside its entry {len(entries)}")
        entries.append(data[start:end])
        position = end
    return entries


def needed_width(index: int, size: int, level: int = 0) -> int:
    """Return the width, 0 to 256, of tile `index` of a level in a tree of `size` entries."""
    return max(0, min(TILE_WIDTH, (size >> 8 * level) - index * TILE_WIDTH))


def tile_files(directory: Path, level: int | str, index: int) -> list[tuple[int, Path]]:
    """Return all stored widths of a tile, in order of their width, with their files."""
    full = directory / tile_path(level, index)
    folder = full.with_name(full.name + ".p")
    widths = [int(f.name) for f in folder.iterdir() if f.name.isascii() and f.name.isdigit()] if folder.is_dir() else []
    found = [(w, folder / str(w)) for w in sorted(widths) if 0 < w < TILE_WIDTH and (folder / str(w)).is_file()]
    return [*found, *([(TILE_WIDTH, full)] if full.is_file() else [])]


def read_tile(directory: Path, level: int | str, index: int, width: int) -> tuple[Path, bytes]:
    """Return file and bytes of the tile of that width, or of the full tile where the partial one has gone.

    Raises:
        TamperError: neither is there.
    """
    for wanted in (width, TILE_WIDTH):
        path = directory / tile_path(level, index, wanted)
        try:
            return path, path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
    path = directory / tile_path(level, index, width)
    raise TamperError(f"{path} is missing, and the checkpoint covers it. Restore it from a copy of the ledger.")


class TileTree:
    """Hashes of a stored tree, for proofs: pass `complete` to `inclusion_proof` or `consistency_proof`.

    Tiles aren't verified here. A proof is: check it against a tree head that you trust.
    """

    def __init__(self, directory: Path, head: TreeHead) -> None:
        self._directory = directory
        self._size = head.size

    def complete(self, height: int, index: int) -> bytes:
        """Return the hash of the complete subtree of `2**height` entries number `index`.

        Raises:
            LedgerError: the tree doesn't have it. TamperError: a tile is missing or cut short.
        """
        if index < 0 or (index + 1) << height > self._size:
            raise LedgerError(f"The tree of {self._size} entries has no complete subtree {index} of height {height}.")
        level, count = height // 8, 1 << height % 8
        tile, offset = divmod(index * count, TILE_WIDTH)
        path, data = read_tile(self._directory, level, tile, needed_width(tile, self._size, level))
        hashes = [data[i * HASH_SIZE : (i + 1) * HASH_SIZE] for i in range(offset, offset + count)]
        if len(hashes[-1]) != HASH_SIZE:
            raise TamperError(f"{path} is cut short: {len(data)} bytes. Restore it from a copy of the ledger.")
        return merge(hashes)
