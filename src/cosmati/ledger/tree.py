"""Merkle trees with SHA-256 (RFC 6962, section 2.1), their proofs and the check of proofs (RFC 9162, 2.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cosmati.errors import LedgerError

EMPTY_ROOT = hashlib.sha256(b"").digest()

CompleteHash: TypeAlias = Callable[[int, int], bytes]
"""`f(height, index)` is the hash of the complete subtree over entries `index * 2**height` up to the next."""


@dataclass(frozen=True, slots=True)
class TreeHead:
    """Size of a tree (entries) and its 32-byte root hash."""

    size: int
    root: bytes


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of an entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def merge(hashes: Sequence[bytes]) -> bytes:
    """Return the root over a power of two of sibling subtrees' hashes."""
    level = list(hashes)
    assert level
    assert len(level) & (len(level) - 1) == 0, "complete subtrees only"
    while len(level) > 1:
        level = [node_hash(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def range_hash(complete: CompleteHash, start: int, end: int) -> bytes:
    """Return MTH of the entries `start` to `end`, a range as the tree's recursion meets it."""
    size = end - start
    if size & (size - 1) == 0:
        height = size.bit_length() - 1
        return complete(height, start >> height)
    split = start + (1 << (size - 1).bit_length() - 1)
    return node_hash(range_hash(complete, start, split), range_hash(complete, split, end))


def tree_root(complete: CompleteHash, size: int) -> bytes:
    """Return the root of a tree of `size` entries."""
    return range_hash(complete, 0, size) if size else EMPTY_ROOT


def inclusion_proof(complete: CompleteHash, index: int, size: int) -> tuple[bytes, ...]:
    """Return the audit path of entry `index` in the tree of `size` entries, from the leaf up.

    Raises:
        LedgerError: there is no such entry.
    """
    if not 0 <= index < size:
        raise LedgerError(f"A tree of {size} entries has no entry {index}. Ask for an index below its size.")
    path, start, end = [], 0, size
    while end - start > 1:
        split = start + (1 << (end - start - 1).bit_length() - 1)
        if index < split:
            path.append((split, end))
            end = split
        else:
            path.append((start, split))
            start = split
    return tuple(range_hash(complete, a, b) for a, b in reversed(path))


def verify_inclusion(leaf: bytes, index: int, head: TreeHead, proof: Sequence[bytes]) -> bool:
    """Return whether the proof shows that the leaf hash stands at `index` under the tree head."""
    if not 0 <= index < head.size:
        return False
    position, last, value = index, head.size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if position & 1 or position == last:
            value = node_hash(sibling, value)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            value = node_hash(value, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and value == head.root


def consistency_proof(complete: CompleteHash, old: int, new: int) -> tuple[bytes, ...]:
    """Return the proof that the tree of `old` entries is a prefix of the tree of `new` entries.

    Raises:
        LedgerError: not 0 <= old <= new.
    """
    if not 0 <= old <= new:
        raise LedgerError(f"A tree of {old} entries can't be a prefix of one of {new}. Exchange the two sizes.")
    if old in {0, new}:
        return ()
    path, start, end, is_whole = [], 0, new, True
    while end != old:
        split = start + (1 << (end - start - 1).bit_length() - 1)
        if old <= split:
            path.append((split, end))
            end = split
        else:
            path.append((start, split))
            start, is_whole = split, False
    if not is_whole:
        path.append((start, end))
    return tuple(range_hash(complete, a, b) for a, b in reversed(path))


def verify_consistency(old: TreeHead, new: TreeHead, proof: Sequence[bytes]) -> bool:
    """Return whether the proof shows that the old tree is a prefix of the new one."""
    if old.size == 0:
        return not proof and old.root == EMPTY_ROOT
    if old.size >= new.size:
        return old == new and not proof
    path = [old.root, *proof] if old.size & (old.size - 1) == 0 else list(proof)
    if not path:
        return False
    position, last = old.size - 1, new.size - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old_value = new_value = path[0]
    for value in path[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            old_value, new_value = node_hash(value, old_value), node_hash(value, new_value)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            new_value = node_hash(new_value, value)
        position, last = position >> 1, last >> 1
    return last == 0 and old_value == old.root and new_value == new.root


class Frontier:
    """The right edge of a growing tree: for each tile level the hashes of the tile that isn't full yet."""

    WIDTH = 256

    def __init__(self) -> None:
        self.levels: list[list[bytes]] = [[]]
        self.size = 0

    def append(self, leaf: bytes) -> list[tuple[int, int, list[bytes]]]:
        """Add a leaf hash; return the tiles that it filled, as (level, index, 256 hashes)."""
        full: list[tuple[int, int, list[bytes]]] = []
        self.size += 1
        level, value = 0, leaf
        while True:
            self.levels[level].append(value)
            if len(self.levels[level]) < self.WIDTH:
                return full
            tile, self.levels[level] = self.levels[level], []
            full.append((level, (self.size >> 8 * (level + 1)) - 1, tile))
            value = merge(tile)
            level += 1
            if level == len(self.levels):
                self.levels.append([])

    def partial_tiles(self) -> list[tuple[int, int, list[bytes]]]:
        """Return the tiles that are neither full nor empty, as (level, index, hashes)."""
        return [
            (level, self.size >> 8 * (level + 1), list(hashes)) for level, hashes in enumerate(self.levels) if hashes
        ]

    def root(self) -> bytes:
        """Return the root hash of all leaves so far."""
        value: bytes | None = None
        for hashes in self.levels:
            left = list(hashes)
            while left:
                block = 1 << (len(left) & -len(left)).bit_length() - 1
                subtree = merge(left[-block:])
                value = subtree if value is None else node_hash(subtree, value)
                del left[-block:]
        return EMPTY_ROOT if value is None else value
