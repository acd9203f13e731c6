"""The Merkle tree of RFC 6962, section 2.1, as it grows: of a log's entries, a source's rows, a model's chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

Digest: TypeAlias = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of bytes: 32 bytes."""
    return hashlib.sha256(data).digest()


def leaf_hash(entry: bytes, digest: Digest = sha256) -> bytes:
    """Return the hash of an entry. Its prefix keeps it from being taken for a node's."""
    return digest(b"\x00" + entry)


def node_hash(left: bytes, right: bytes, digest: Digest = sha256) -> bytes:
    """Return the hash of a node over the roots of its two subtrees."""
    return digest(b"\x01" + left + right)


class MerkleTree:
    """A growing tree, in memory for its right edge only.

    Args:
        edge: roots of complete subtrees, largest first, each with its number of leaves: the state to go on from.
        digest: hash function of the nodes.
    """

    def __init__(self, edge: Iterable[tuple[int, bytes]] = (), *, digest: Digest = sha256) -> None:
        self.edge = list(edge)
        self._digest = digest

    @property
    def size(self) -> int:
        """Number of leaves."""
        return sum(size for size, _ in self.edge)

    def append(self, leaf: bytes, size: int = 1) -> list[bytes]:
        """Take the next leaf hash; return the roots of the subtrees that it completes, over 1, 2, 4 ... leaves.

        Args:
            leaf: a leaf's hash, or the root of a complete subtree.
            size: how many leaves that is: a power of 2 of which the leaves so far are a multiple.
        """
        roots = [leaf]
        while self.edge and self.edge[-1][0] == size:
            roots.append(self._node(self.edge.pop()[1], roots[-1]))
            size *= 2
        self.edge.append((size, roots[-1]))
        return roots

    def root(self) -> bytes:
        """Return the root over all leaves so far; of no leaf it's the hash of nothing."""
        if not self.edge:
            return self._digest(b"")
        root = self.edge[-1][1]
        for _, left in reversed(self.edge[:-1]):
            root = self._node(left, root)
        return root

    def _node(self, left: bytes, right: bytes) -> bytes:
        return node_hash(left, right, self._digest)
