"""Files of Fashion-MNIST's format with a few random rows, written byte by byte."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

NAMES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.astype(np.uint8).tobytes()


def write(folder: Path, num_train: int = 6, num_test: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, rows in (("train", num_train), ("t10k", num_test)):
        arrays[f"{part}-images-idx3-ubyte.gz"] = rng.integers(0, 256, (rows, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte.gz"] = rng.integers(0, 10, rows)
    for name, values in arrays.items():
        (folder / name).write_bytes(gzip.compress(idx(values)))
    return arrays
