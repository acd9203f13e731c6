"""Reads cosigned checkpoints and consistency proofs by their specifications, with nothing of Cosmati's.

C2SP signed-note and tlog-cosignature; RFC 6962, sections 2.1 and 2.1.2, over all leaves.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def cosigned_at(note: bytes, vkey: str) -> int | None:
    """Return when the holder of a key cosigned a note, in seconds since 1970; None where nobody did so validly."""
    name, key_id, encoded = vkey.split("+", 2)
    key = base64.b64decode(encoded)
    assert key[:1] == b"\x04"
    assert hashlib.sha256(name.encode() + b"\n" + key).hexdigest()[:8] == key_id
    body, _, signatures = note.decode().rpartition("\n\n")
    for line in signatures.splitlines():
        dash, signer, blob = line.split(" ")
        data = base64.b64decode(blob, validate=True)
        if (dash, signer, data[:4].hex()) != ("\u2014", name, key_id):
            continue
        time = int.from_bytes(data[4:12], "big")
        message = b"cosignature/v1\ntime %d\n" % time + body.encode() + b"\n"
        try:
            Ed25519PublicKey.from_public_bytes(key[1:]).verify(data[12:], message)
        except InvalidSignature:
            return None
        return time
    return None


def tree_hash(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, over entries."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return hashlib.sha256(b"\1" + tree_hash(leaves[:half]) + tree_hash(leaves[half:])).digest()


def consistency_proof(size: int, leaves: list[bytes]) -> list[bytes]:
    """PROOF(m, D[n]) of RFC 6962."""
    return _subproof(size, leaves, whole=True)


def _subproof(size: int, leaves: list[bytes], *, whole: bool) -> list[bytes]:
    if size == len(leaves):
        return [] if whole else [tree_hash(leaves)]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    if size <= half:
        return [*_subproof(size, leaves[:half], whole=whole), tree_hash(leaves[half:])]
    return [*_subproof(size - half, leaves[half:], whole=False), tree_hash(leaves[:half])]
