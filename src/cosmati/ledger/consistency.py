"""Consistency proofs: that one tree is the beginning of another (RFC 6962, section 2.1.2), made from a log's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.ledger.note import TreeHead
from cosmati.ledger.tiles import TILE_WIDTH, needed_width, read_tile
from cosmati.storage.merkle import MerkleTree, node_hash

HASH_SIZE = 32
_TILE_HEIGHT = TILE_WIDTH.bit_length() - 1


def prove_consistency(directory: Path, old_size: int, new_size: int) -> list[bytes]:
    """Return the hashes that show the tree of `old_size` entries to be the beginning of that of `new_size`.

    Only tiles are read, and nothing is checked: whoever gets the proof does that (`is_consistent`).

    Args:
        directory: of a ledger whose checkpoint covers `new_size` entries.
        old_size: of the earlier tree.
        new_size: of the later one.

    Raises:
        LedgerError: the earlier tree is the larger one. TamperError: a tile is missing.
    """
    if not 0 <= old_size <= new_size:
        raise LedgerError(
            f"A tree of {new_size} entries doesn't go on from one of {old_size}. Ask the other way round."
        )
    if old_size in (0, new_size):
        return []
    return _subproof(_Tiles(directory, new_size), old_size, 0, new_size, is_whole=True)


def is_consistent(old: TreeHead, new: TreeHead, proof: Sequence[bytes]) -> bool:
    """Return whether a proof shows that the tree of `new` begins with that of `old`."""
    if old.size in (0, new.size):
        return not proof and (old.size == 0 or old.root == new.root)
    if not old.size < new.size:
        return False
    # An old tree that is a whole subtree of the new one isn't repeated in the proof.
    path = [old.root, *proof] if old.size & (old.size - 1) == 0 else list(proof)
    last_old, last_new = old.size - 1, new.size - 1
    while last_old & 1:
        last_old, last_new = last_old >> 1, last_new >> 1
    if not path:
        return False
    old_root = new_root = path[0]
    for sibling in path[1:]:
        if last_new == 0:
            return False
        if last_old & 1 or last_old == last_new:
            old_root, new_root = node_hash(sibling, old_root), node_hash(sibling, new_root)
            while last_old and not last_old & 1:
                last_old, last_new = last_old >> 1, last_new >> 1
        else:
            new_root = node_hash(new_root, sibling)
        last_old, last_new = last_old >> 1, last_new >> 1
    return last_new == 0 and (old_root, new_root) == (old.root, new.root)


def _subproof(tiles: _Tiles, size: int, start: int, end: int, *, is_whole: bool) -> list[bytes]:
    """SUBPROOF(m, D[n], b), of the entries from `start` to `end`; the earlier tree has the first `size` of them."""
    if size == end - start:
        return [] if is_whole else [tiles.root(start, end)]
    half = 1 << (end - start - 1).bit_length() - 1
    if size <= half:
        return [*_subproof(tiles, size, start, start + half, is_whole=is_whole), tiles.root(start + half, end)]
    inner = _subproof(tiles, size - half, start + half, end, is_whole=False)
    return [*inner, tiles.root(start, start + half)]


class _Tiles:
    """Roots of a log's subtrees."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory, self._size = directory, size

    def root(self, start: int, end: int) -> bytes:
        """Return the root over the entries from `start` to `end`; `start` is where such a subtree may begin."""
        half = 1 << (end - start - 1).bit_length() - 1 if end - start > 1 else 0
        if half and half * 2 != end - start:
            return node_hash(self.root(start, start + half), self.root(start + half, end))
        height = (end - start).bit_length() - 1
        level, below = divmod(height, _TILE_HEIGHT)
        first, num = start >> level * _TILE_HEIGHT, 1 << below
        index, offset = divmod(first, TILE_WIDTH)
        _, data = read_tile(self._directory, level, index, needed_width(index, self._size, level))
        tree = MerkleTree()
        for number in range(offset, offset + num):
            tree.append(data[number * HASH_SIZE : (number + 1) * HASH_SIZE])
        return tree.root()
