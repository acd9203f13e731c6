"""A reader written from the C2SP documents alone: tlog-tiles, tlog-checkpoint, signed-note, and RFC 6962.

It imports nothing of the package that wrote the log. `python outside_reader.py DIRECTORY` prints what it
found.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def read_checkpoint(directory: Path) -> tuple[str, int, bytes]:
    """Verify the signed note with the verifier key beside it; return origin, size and root."""
    name, key_hash, encoded = (directory / "operator.vkey").read_text().strip().split("+", 2)
    key = base64.b64decode(encoded)
    assert key[0] == 1, "Ed25519"
    key_id = sha256(name.encode() + b"\n" + key)[:4]
    assert key_id.hex() == key_hash
    text, _, signatures = (directory / "checkpoint").read_text("utf-8").rpartition("\n\n")
    text += "\n"
    verified = 0
    for line in signatures.splitlines():
        dash, signer, signature = line.split(" ")
        assert dash == "—"
        data = base64.b64decode(signature)
        if signer == name and data[:4] == key_id:
            Ed25519PublicKey.from_public_bytes(key[1:]).verify(data[4:], text.encode())
            verified += 1
    assert verified == 1
    origin, size, root = text.splitlines()[:3]
    return origin, int(size), base64.b64decode(root)


def fetch(directory: Path, level: str, index: int, width: int) -> bytes:
    """Return a tile; index 1234067 is x001/x234/067, and a partial one has its width behind it."""
    name = f"{index % 1000:03d}"
    while index >= 1000:
        index //= 1000
        name = f"x{index % 1000:03d}/{name}"
    path = directory / "tile" / level / name
    partial = path.with_name(path.name + ".p") / str(width)
    # Where the partial one is gone the full one holds it.
    return (partial if width < 256 and partial.exists() else path).read_bytes()


def read_entries(directory: Path, size: int) -> list[bytes]:
    """Return all entries from their bundles."""
    entries = []
    for start in range(0, size, 256):
        width = min(256, size - start)
        data = fetch(directory, "entries", start // 256, width)
        for _ in range(width):
            length = int.from_bytes(data[:2], "big")
            assert len(data) >= 2 + length
            entries.append(data[2 : 2 + length])
            data = data[2 + length :]
        assert not data or (directory / "tile" / "entries" / f"{start // 256:03d}").exists()
    return entries


def root_of(hashes: list[bytes]) -> bytes:
    """Return MTH over leaf hashes."""
    if len(hashes) == 1:
        return hashes[0]
    k = 1
    while k * 2 < len(hashes):
        k *= 2
    return sha256(b"\x01" + root_of(hashes[:k]) + root_of(hashes[k:]))


def subtree(directory: Path, size: int, start: int, end: int) -> bytes:
    """Return MTH(D[start:end]) from tiles: the largest whole tile entries, hashed together."""
    count, level = end - start, 0
    if count & (count - 1) == 0:
        while count >= 256:
            count, level = count // 256, level + 1
        first = start >> 8 * level
        tile = first // 256
        data = fetch(directory, str(level), tile, min(256, (size >> 8 * level) - tile * 256))
        hashes = [data[i * 32 : i * 32 + 32] for i in range(first % 256, first % 256 + count)]
        return root_of(hashes)
    k = 1
    while k * 2 < count:
        k *= 2
    return sha256(b"\x01" + subtree(directory, size, start, start + k) + subtree(directory, size, start + k, end))


def audit_path(directory: Path, size: int, index: int, start: int, end: int) -> list[tuple[bytes, bool]]:
    """Return the siblings from the leaf up, each with whether it stands on the left."""
    if end - start == 1:
        return []
    k = 1
    while k * 2 < end - start:
        k *= 2
    split = start + k
    if index < split:
        return [
            *audit_path(directory, size, index, start, split),
            (subtree(directory, size, split, end), False),
        ]
    return [*audit_path(directory, size, index, split, end), (subtree(directory, size, start, split), True)]


def check_log(directory: Path) -> tuple[str, int]:
    """Verify the log and one inclusion proof for each of some entries; return its origin and size."""
    origin, size, root = read_checkpoint(directory)
    entries = read_entries(directory, size)
    hashes = [sha256(b"\x00" + entry) for entry in entries]
    assert root_of(hashes) == root, "the entries give the signed root"
    for index in {0, size // 2, size - 1}:
        value = hashes[index]
        for sibling, is_left in audit_path(directory, size, index, 0, size):
            value = sha256(b"\x01" + (sibling + value if is_left else value + sibling))
        assert value == root, f"entry {index} is included"
    return origin, size


if __name__ == "__main__":
    print(*check_log(Path(sys.argv[1])))  # noqa: T201
