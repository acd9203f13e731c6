"""Files of a C2SP tlog-tiles log: paths, tiles of hashes, bundles of entries."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from cosmati.errors import TamperError
from cosmati.storage.merkle import MerkleTree, node_hash

_TILE_HEIGHT = 8
TILE_WIDTH = 1 << _TILE_HEIGHT
ENTRIES = "entries"
HASH_SIZE = 32
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
    return max(0, min(TILE_WIDTH, (size >> _TILE_HEIGHT * level) - index * TILE_WIDTH))


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


class Frontier:
    """The right edge of a growing tree, and for each tile level the hashes of the tile that isn't full yet."""

    def __init__(self) -> None:
        self.levels: list[list[bytes]] = []
        self.size = 0
        self._tree = MerkleTree()

    def append(self, leaf: bytes) -> list[tuple[int, int, list[bytes]]]:
        """Add a leaf hash; return the tiles that it filled, as (level, index, 256 hashes)."""
        self.size += 1
        return self._fill(0, self._tree.append(leaf)[::_TILE_HEIGHT])

    def append_tile(self, leaves: list[bytes]) -> list[tuple[int, int, list[bytes]]]:
        """Add 256 leaf hashes where the last tile is full; return the tiles that they filled, as `append` does."""
        self.size += TILE_WIDTH
        self.levels = self.levels or [[]]
        nodes = leaves
        while len(nodes) > 1:
            nodes = [node_hash(left, right) for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
        full = self._fill(1, self._tree.append(nodes[0], TILE_WIDTH)[::_TILE_HEIGHT])
        return [(0, (self.size >> _TILE_HEIGHT) - 1, leaves), *full]

    def _fill(self, lowest: int, roots: list[bytes]) -> list[tuple[int, int, list[bytes]]]:
        full: list[tuple[int, int, list[bytes]]] = []
        for level, value in enumerate(roots, lowest):
            if level == len(self.levels):
                self.levels.append([])
            self.levels[level].append(value)
            if len(self.levels[level]) == TILE_WIDTH:
                full.append((level, (self.size >> _TILE_HEIGHT * (level + 1)) - 1, self.levels[level]))
                self.levels[level] = []
        return full

    @classmethod
    def of_tiles(cls, directory: Path, size: int) -> Frontier:
        """Return the edge of the tree of the first `size` entries, a multiple of 256, as the tiles have it, unchecked.

        Raises:
            TamperError: a tile is missing or too short.
        """
        edge, top = cls(), max(0, (size.bit_length() - 1) // _TILE_HEIGHT)
        for level in range(top, -1, -1):
            index, width = divmod(size >> _TILE_HEIGHT * level, TILE_WIDTH)
            # A tile grows: the one of just that width may never have been written.
            wide = next((path for stored, path in tile_files(directory, level, index) if stored >= width), None)
            data = wide.read_bytes() if wide is not None and width else b""
            hashes = [data[i : i + HASH_SIZE] for i in range(0, width * HASH_SIZE, HASH_SIZE)]
            if len(data) < width * HASH_SIZE:
                path = directory / tile_path(level, index, width)
                raise TamperError(f"{path} is missing or cut short. Restore it from a copy of the ledger.")
            for value in hashes:
                edge._tree.append(value, TILE_WIDTH**level)
            edge.levels.insert(0, hashes)
        edge.size = size
        return edge

    def partial_tiles(self) -> list[tuple[int, int, list[bytes]]]:
        """Return the tiles that are neither full nor empty, as (level, index, hashes)."""
        return [
            (level, self.size >> _TILE_HEIGHT * (level + 1), list(hashes))
            for level, hashes in enumerate(self.levels)
            if hashes
        ]

    def root(self) -> bytes:
        """Return the root hash of all leaves so far."""
        return self._tree.root()
