"""The rows of the data sets in `written/`, which mosaicml-streaming 0.13 wrote."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import numpy as np
from PIL import Image

SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")

COLUMNS = {
    "int": "int",
    "str": "str",
    "bytes": "bytes",
    "json": "json",
    "json_array": "json",
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "array": "ndarray",
    "array_int16": "ndarray:int16",
    "array_fixed": "ndarray:float32:2,3",
    "pil": "pil",
    "jpeg": "jpeg",
    "png": "png",
    "pils": "list[pil]",
    "jpegs": "list[jpeg]",
    "pngs": "list[png]",
    "jpeg_array": "jpeg_array",
    "jpegarray": "jpegarray",
} | {name: name for name in SCALARS}

FEW = {"number": "int", "text": "str"}
SPLIT = {"number": "int", "text": "str", "part": "float"}
COMPRESSIONS = ("br", "br:2", "bz2", "bz2:1", "gz", "gz:1", "snappy", "zstd", "zstd:9")
HASHES = (
    "blake2b", "blake2s", "md5", "sha1", "sha224", "sha256", "sha384", "sha3_224", "sha3_256", "sha3_384", "sha3_512",
    "sha512", "xxh128", "xxh32", "xxh3_128", "xxh3_64", "xxh64",
)  # fmt: skip
SPLITS: dict[str, dict[str, Any]] = {
    "json": {},
    "csv": {},
    "tsv": {},
    "xsv": {"separator": "::", "newline": "\r\n"},
    "json-zstd": {"compression": "zstd", "hashes": ["sha3_512"]},
    "csv-gz": {"compression": "gz", "hashes": ["xxh3_64"]},
}


def image(n: int, mode: str = "RGB") -> Image.Image:
    """Return a small picture."""
    pixels = np.arange(8 * 6 * 3).reshape(6, 8, 3) * (n + 1) % 256
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def jpeg(n: int) -> bytes:
    """Return a small picture's JPEG file."""
    stream = io.BytesIO()
    image(n).save(stream, format="JPEG")
    return stream.getvalue()


def row(n: int) -> dict[str, Any]:
    """Return a row with every encoding."""
    values: dict[str, Any] = {
        "int": n - 1,
        "str": f"héllo {n}",
        "bytes": bytes(range(n, n + 5)),
        "json": {"n": [n, None, "ü"]},
        "json_array": np.arange(n + 2),
        "str_int": 10**30 + n,
        "str_float": n / 3,
        "str_decimal": Decimal("1.10") * n,
        "array": np.arange(n + 1, dtype=np.uint16).reshape(1, n + 1),
        "array_int16": np.full((n + 1, 2), -n, np.int16),
        "array_fixed": np.full((2, 3), n / 2, np.float32),
        "pil": image(n, "L"),
        "jpeg": image(n),
        "png": image(n),
        "pils": [image(n)],
        "jpegs": [image(n), image(n + 1)],
        "pngs": [image(n)] * max(1, n),
        "jpeg_array": [bytearray(jpeg(n)), bytearray(jpeg(n + 1))],
        "jpegarray": [bytearray(jpeg(n))],
    }
    for name in SCALARS:
        values[name] = -n if name.startswith("int") else n if name.startswith("uint") else n / 2
    return values


def few(n: int) -> dict[str, Any]:
    """Return a row of `hashes` and `compression`."""
    return {"number": n, "text": f"text {n}"}


def split(n: int) -> dict[str, Any]:
    """Return a row of `split`."""
    return {"number": n - 2, "text": f"tëxt {n}", "part": n / 4}
