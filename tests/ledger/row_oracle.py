"""Row commitments by their documented form, from a run's private folder; nothing of the library."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from blake3 import blake3


@lru_cache(4096)
def child(key: bytes, index: int) -> bytes:
    return blake3(b"cosmati row keys", key=key).digest(length=32, seek=32 * index)


def key_at(root: bytes, place: int) -> bytes:
    """The leaf of a tree: a byte of its place for each level, the highest first."""
    for index in struct.pack(">Q", place):
        root = child(root, index)
    return root


def key_of_class(root: bytes, name: str) -> bytes:
    return key_at(root, int.from_bytes(blake3(b"cosmati class " + name.encode()).digest()[:8], "big") | 1 << 63)


class Rows:
    """What blinds a run's rows: its root, of which nothing is forgotten, and the name of its log."""

    def __init__(self, run: Path, origin: str = "") -> None:
        data = (run / "private" / "rows.keys").read_bytes()
        magic, _, rest = data.split(b"\n", 2)
        assert magic == b"cosmati row keys 1"
        assert rest[0] == 1
        self.root = rest[1:33]
        self.origin = origin or (run / "ledger" / "operator.vkey").read_text().split("+")[0]

    def blind(self, name: str, step: int, m: int, slot: int, owners: Iterable[int]) -> bytes:
        of_class = key_of_class(self.root, name)
        first, *others = [key_at(self.root, one) for one in owners if one >= 0] or [of_class]
        place = f"cosmati row {self.origin}\n{step}/{m}/".encode() + struct.pack("<I", slot)
        return blake3(b"".join([of_class, *others, place]), key=first).digest()

    def leaf(
        self, name: str, step: int, m: int, slot: int, ids: list[int], content: bytes = b"", owners: Iterable[int] = ()
    ) -> bytes:
        blind = self.blind(name, step, m, slot, owners or ids)
        return hashlib.sha256(bytes([0, bool(content)]) + blind + struct.pack(f"<{len(ids)}q", *ids) + content).digest()

    def commitment(self, name: str, step: int, m: int, rows: Iterable[tuple[int, int]]) -> bytes:
        """Of rows without known content: slot and id of each."""
        leaves = [self.leaf(name, step, m, slot, [row]) for slot, row in rows]
        return hashlib.sha256(b"".join(leaves)).digest()
