"""The tree of RFC 6962, by its own words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def mth(entries: Sequence[bytes], digest: Callable[[bytes], bytes] = sha256) -> bytes:
    """MTH of section 2.1."""
    leaves = [digest(b"\x00" + entry) for entry in entries]
    return root_of(leaves, digest)


def root_of(leaves: Sequence[bytes], digest: Callable[[bytes], bytes] = sha256) -> bytes:
    """MTH over leaves that are hashed already."""
    if len(leaves) < 2:
        return leaves[0] if leaves else digest(b"")
    split = max(2**p for p in range(20) if 2**p < len(leaves))
    return digest(b"\x01" + root_of(leaves[:split], digest) + root_of(leaves[split:], digest))
