"""Keys of rows, each of which can be forgotten while all others stay: a puncturable tree in one small file.

A row's key is a leaf of a tree with 256 branches at each of 8 levels, by the bytes of its id (Goldreich, Goldwasser and
Micali, 1986; keyed BLAKE3 is the generator). The file holds nodes that cover all ids, at first the root alone. To
forget a row, the node above it is replaced by those beside its path: from what is left, its key can't be derived by
anybody, and a commitment that was made with it can't be opened or guessed at any more. It's the one thing here that
forgets.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import blake3
import numpy as np
from numpy.typing import NDArray

from cosmati.errors import LedgerError
from cosmati.storage.atomic import create_secret, draft_of, publish

KEY_BYTES = 32
_WIDTH, _DEPTH = 256, 8
_MAGIC = b"cosmati row keys 1\n"
_KEPT_BLOCKS = 8192
"""Of 256 keys each: 64 MiB at most. Ids in a row share a block."""

Nodes = Mapping[bytes, bytes]
"""A key by the bytes of the ids that it covers: none of them begins with another."""


class RowKeys:
    """Derives the keys of rows from the nodes that are left.

    Args:
        nodes: that cover all ids but those that were forgotten.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = dict(nodes)
        self._block = lru_cache(_KEPT_BLOCKS)(self._derived)

    @classmethod
    def new(cls) -> RowKeys:
        """Return keys of all ids, at random."""
        return cls({b"": secrets.token_bytes(KEY_BYTES)})

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the keys of rows, zeros for those that were forgotten.

        Args:
            ids: [...].

        Returns:
            [..., 32].
        """
        flat, block = ids.reshape(-1), self._block
        places = zip((flat // _WIDTH).tolist(), (flat % _WIDTH * KEY_BYTES).tolist(), strict=True)
        keys = b"".join([block(number)[start : start + KEY_BYTES] for number, start in places])
        return np.frombuffer(keys, np.uint8).reshape(*ids.shape, KEY_BYTES)

    def has(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each row still has a key. [...], as the ids."""
        return np.asarray(self.of(ids).any(axis=-1))

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the keys of rows, for good; those that are gone already stay gone."""
        for row in ids:
            path = struct.pack(">q", row)
            above = next((path[:depth] for depth in range(_DEPTH + 1) if path[:depth] in self.nodes), None)
            if above is None:
                continue
            key = self.nodes.pop(above)
            for depth in range(len(above), _DEPTH):
                keys = _branches(key)
                for branch in range(_WIDTH):
                    if branch != path[depth]:
                        self.nodes[path[:depth] + bytes((branch,))] = _branch(keys, branch)
                key = _branch(keys, path[depth])
        self._block.cache_clear()

    def _derived(self, number: int) -> bytes:
        """Return the keys of the 256 ids from 256 x `number` on, one after another, zeros for those without."""
        head = struct.pack(">q", number * _WIDTH)[:-1]
        for depth in range(_DEPTH):
            if (key := self.nodes.get(head[:depth])) is not None:
                for branch in head[depth:]:
                    key = _branch(_branches(key), branch)
                return _branches(key)
        return b"".join(self.nodes.get(head + bytes((branch,)), bytes(KEY_BYTES)) for branch in range(_WIDTH))


def _branches(key: bytes) -> bytes:
    """Return the keys of a node's branches, one after another."""
    return blake3.blake3(b"cosmati row keys", key=key).digest(length=_WIDTH * KEY_BYTES)


def _branch(keys: bytes, number: int) -> bytes:
    return keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]


def create_row_keys(path: Path) -> RowKeys:
    """Write new keys into a new file that only its owner may read, and return them.

    Raises:
        FileExistsError: it's there already.
    """
    keys = RowKeys.new()
    create_secret(path, encode_row_keys(keys))
    return keys


def load_row_keys(path: Path) -> RowKeys:
    """Read keys.

    Raises:
        LedgerError: it can't be read, or holds something else.
    """
    try:
        return decode_row_keys(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LedgerError(f"The keys of rows {path} can't be read: {error}. Restore the file.") from error


def replace_row_keys(path: Path, keys: RowKeys) -> None:
    """Put keys in the place of those in a file, and overwrite the old ones where they lay.

    What a file system, its snapshots or a backup keep besides isn't reached.
    """
    draft = draft_of(path)
    draft.unlink(missing_ok=True)  # of one that was killed here
    create_secret(draft, encode_row_keys(keys))
    with path.open("r+b") as old:
        size = old.seek(0, 2)
        publish(draft, path)
        old.seek(0)
        old.write(bytes(size))
        old.flush()


def encode_row_keys(keys: RowKeys) -> bytes:
    """Return the file's bytes: a line that says what it is, then each node's length, bytes and key, in order."""
    nodes = (bytes((len(head),)) + head + key for head, key in sorted(keys.nodes.items()))
    return _MAGIC + b"".join(nodes)


def decode_row_keys(data: bytes) -> RowKeys:
    """Read a file's bytes; `decode_row_keys(encode_row_keys(k))` has the nodes of `k`, and no other bytes are accepted.

    Raises:
        ValueError: it isn't such a file.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("it holds no keys of rows")
    nodes, place = dict[bytes, bytes](), len(_MAGIC)
    while place < len(data):
        end = place + 1 + data[place] + KEY_BYTES
        if data[place] > _DEPTH or end > len(data):
            raise ValueError("it's damaged")
        nodes[data[place + 1 : end - KEY_BYTES]] = data[end - KEY_BYTES : end]
        place = end
    keys = RowKeys(nodes)
    if encode_row_keys(keys) != data or any(head[:depth] in nodes for head in nodes for depth in range(len(head))):
        raise ValueError("it's damaged")
    return keys
