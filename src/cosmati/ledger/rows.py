"""Commitments to the rows of a microbatch: which they were and what was in them, each to be opened by itself.

A row's leaf is SHA-256(0x00 || has_content || blind || ids || content): `has_content` is a byte, 0 or 1; `blind` 32
bytes that only the operator can derive (`row_secrets`); `ids` the row's id, or those of the rows it was mixed from
(int64, little-endian); `content` the digest of its content where the source knows one. A microbatch's commitment is
SHA-256 over its leaves in order. Who is shown a row's blind, ids and content, and the other rows' leaves, sees that it
took part, and learns nothing of the others.
"""

from __future__ import annotations

import hashlib

import blake3
import numpy as np
from numpy.typing import NDArray

ROWS_VERSION = 3
"""Of the blinds: each from its rows' own keys (`row_secrets`), so that a row can be forgotten.

2 derives all from one salt, and 1 did so by an HMAC for each; a run goes on with the version with which it was begun.
"""

SALTED_VERSION = 2
BLIND_BYTES = 32


def derive_blinds(salt: bytes, step: int, microbatch: int, num_rows: int) -> NDArray[np.uint8]:
    """Derive the blinds of a microbatch's rows, of version 2: keyed BLAKE3 over the position, as long as it takes.

    Args:
        salt: the run's own, 32 bytes.
        step: number of the step.
        microbatch: its index in the step.
        num_rows: slots of the microbatch, tombstones included.

    Returns:
        [rows, 32].
    """
    hasher = blake3.blake3(f"cosmati rows {step}/{microbatch}".encode(), key=salt)
    return np.frombuffer(hasher.digest(length=BLIND_BYTES * num_rows), dtype=np.uint8).reshape(num_rows, BLIND_BYTES)


def hash_rows(
    blinds: NDArray[np.uint8], ids: NDArray[np.int64], contents: NDArray[np.uint8] | None = None
) -> list[bytes]:
    """Return the leaves of rows.

    Args:
        blinds: [rows, 32].
        ids: [rows, parents + 1].
        contents: digests of the rows' content [rows, 32]; None where the source doesn't know them.
    """
    head = np.zeros((len(ids), 2), np.uint8)
    head[:, 1] = contents is not None
    parts = [head, blinds, np.ascontiguousarray(ids, "<i8").view(np.uint8)]
    if contents is not None:
        parts.append(contents)
    rows = np.concatenate(parts, axis=1)
    width, content, sha256 = rows.shape[1], rows.tobytes(), hashlib.sha256
    return [sha256(content[start : start + width]).digest() for start in range(0, len(content), width)]


def commit_rows(leaves: list[bytes]) -> bytes:
    """Return the commitment to leaves in order: 32 bytes."""
    return hashlib.sha256(b"".join(leaves)).digest()
