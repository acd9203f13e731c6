"""What the ledger says of directions, entropies and digests, computed once more from the definitions alone."""

from __future__ import annotations

import hashlib
from base64 import b64decode

import blake3
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def projection(seed: int, name: str, size: int) -> Values:
    """Return the whole matrix [16, size] of signs over 4 that sketches a parameter, in float64."""
    num_groups = -(-size // 16)
    data = hashlib.shake_128(f"cosmati direction sketch 1\0{seed}\0{name}".encode()).digest(4 * num_groups)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    signs = 1.0 - 2.0 * bits.reshape(2, num_groups, 16)
    hadamard = np.ones((1, 1))
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    blocks = [np.diag(outer) @ hadamard @ np.diag(inner) for inner, outer in zip(*signs, strict=True)]
    return np.concatenate(blocks, axis=1)[:, :size] / 4.0


def sketch_of(seed: int, tensors: dict[str, Values]) -> Values:
    """Return the sketch of several parameters' values together."""
    found = [projection(seed, name, value.size) @ value.ravel() for name, value in tensors.items()]
    return np.sum(found, axis=0)


def norm_of(tensors: dict[str, Values]) -> float:
    return float(np.sqrt(sum(np.square(value).sum() for value in tensors.values())))


def decoded(text: str) -> Values:
    found: Values = np.frombuffer(b64decode(text), "<f2").astype(np.float64)
    return found


def entropy_of(samples: Values) -> float:
    """Return the spectral entropy by singular values of the centred samples."""
    values = np.linalg.svd(samples - samples.mean(0), compute_uv=False) ** 2
    if not values.sum():
        return 0.0
    shares = values / values.sum()
    return float(-sum(share * np.log(share) for share in shares if share > 0))


def root_of(leaves: list[bytes]) -> bytes:
    """Return the root of RFC 6962's tree, with BLAKE3."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while half * 2 < len(leaves):
        half *= 2
    return blake3.blake3(b"\1" + root_of(leaves[:half]) + root_of(leaves[half:])).digest()


def digest_of(tensors: dict[str, NDArray[np.float32]]) -> str:
    """Return the digest of a region of float32 parameters, each smaller than 1 MiB, in hexadecimal."""
    roots = []
    for name, value in sorted(tensors.items()):
        head = f"{name}\0torch.float32\0{tuple(value.shape)}".encode()
        leaves = [head] + ([value.tobytes()] if value.size else [])
        roots.append(root_of([blake3.blake3(b"\0" + one).digest() for one in leaves]))
    return root_of(roots).hex()
