"""Fashion-MNIST: 70,000 grey images of ten kinds of clothing, 28 pixels a side.

Source: H. Xiao, K. Rasul and R. Vollgraf (2017), Fashion-MNIST, arXiv 1708.07747,
github.com/zalandoresearch/fashion-mnist, licence MIT. The files are in MNIST's format (yann.lecun.com/exdb/mnist):
idx, big-endian, compressed with gzip. Nothing is downloaded unless asked for.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from cosmati.corpora.digits import ImageRows
from cosmati.errors import DataError
from cosmati.provenance.taxonomy import software_licences
from cosmati.storage.atomic import replace_file

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
PUBLIC_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
IMAGE_SIZE = 28
GREY_MEAN = 0.2860
GREY_STD = 0.3530
"""Over the training images, of grey levels in [0, 1]."""

_KINDS = 10
_MAX_LEVEL = 255
_UBYTE = 8
"""idx's code of unsigned bytes."""
_PARTS = {"train": "train", "test": "t10k"}
_NUM_ROWS = {"train": 60_000, "test": 10_000}
_CONTENT_SHA256 = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of the files unpacked: Debian's are packed anew, without their names, and have the same content."""


@dataclass(frozen=True, eq=False)
class FashionMNIST:
    """The images in their two published parts, with the classes of `software_licences`; all are `open/permissive`.

    Row ids count the training images from 0, and the test images on from there.
    """

    train: ImageRows
    test: ImageRows
    class_names: tuple[str, ...]


def load_fashion_mnist(folder: str | Path | None = None) -> FashionMNIST:
    """Load the images and labels from their four files.

    Args:
        folder: holds `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, `t10k-images-idx3-ubyte.gz` and
            `t10k-labels-idx1-ubyte.gz`; None is where Debian's package puts them.

    Raises:
        DataError: a file is missing, damaged, or of another format than it should be.
    """
    folder = DEBIAN_FOLDER if folder is None else Path(folder).expanduser()
    missing = [name for name in _CONTENT_SHA256 if not (folder / name).is_file()]
    if missing:
        msg = (
            f"Fashion-MNIST isn't in {folder}: there is no {', no '.join(missing)}. On Debian or Ubuntu run 'apt-get "
            f"install dataset-fashion-mnist'; elsewhere call download_fashion_mnist(folder), which takes it from "
            f"{PUBLIC_URL}, and give that folder."
        )
        raise DataError(msg)
    taxonomy = software_licences()
    class_id = taxonomy.id_of("open/permissive")
    train = _read_part(folder, "train", 0, class_id)
    return FashionMNIST(train, _read_part(folder, "test", len(train.targets), class_id), taxonomy.classes)


def download_fashion_mnist(folder: str | Path) -> None:
    """Download the four files, 31 MB, where they aren't in a folder yet, and check the content of each.

    Raises:
        DataError: a file can't be had, or its content isn't Fashion-MNIST's.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in _CONTENT_SHA256.items():
        if (folder / name).exists():
            continue
        url = f"{PUBLIC_URL}/{name}"
        try:
            with urlopen(url, timeout=60) as answer:  # noqa: S310  (a constant address; the content is checked)
                packed = answer.read()
        except (URLError, OSError) as error:
            msg = f"{url} can't be read ({error}). Try again, or run 'apt-get install dataset-fashion-mnist' on Debian."
            raise DataError(msg) from error
        if hashlib.sha256(_unpacked(packed, url)).hexdigest() != digest:
            msg = f"What {url} gives isn't Fashion-MNIST: its SHA-256 differs. Nothing was kept; take another source."
            raise DataError(msg)
        replace_file(folder / name, packed)


def _unpacked(packed: bytes, place: str | Path) -> bytes:
    try:
        return gzip.decompress(packed)
    except (EOFError, OSError, zlib.error) as error:
        msg = f"{place} is no whole gzip file ({error}). Remove it and fetch it again."
        raise DataError(msg) from error


def _read_part(folder: Path, part: Literal["train", "test"], first_row: int, class_id: int) -> ImageRows:
    path = folder / f"{_PARTS[part]}-labels-idx1-ubyte.gz"
    labels = _read_idx(path, 1)
    pixels = _read_idx(folder / f"{_PARTS[part]}-images-idx3-ubyte.gz", 3)
    if len(labels) != len(pixels) or pixels.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE) or not len(labels):
        msg = (
            f"The {part} part in {folder} has images {pixels.shape} and {len(labels)} labels; Fashion-MNIST has "
            f"{_NUM_ROWS[part]} of each, {IMAGE_SIZE} pixels a side. Fetch the files again."
        )
        raise DataError(msg)
    if labels.max() >= _KINDS:
        msg = f"{path} has the label {labels.max()}; Fashion-MNIST's go from 0 to {_KINDS - 1}. Fetch it again."
        raise DataError(msg)
    content = np.concatenate([pixels.reshape(len(pixels), -1), labels[:, None]], axis=1)
    digests = b"".join(hashlib.sha256(row).digest() for row in content)
    return ImageRows(
        images=(torch.from_numpy(pixels.astype(np.float32))[:, None] / _MAX_LEVEL - GREY_MEAN) / GREY_STD,
        targets=torch.from_numpy(labels.astype(np.int64)),
        class_ids=torch.full((len(labels),), class_id),
        row_ids=torch.arange(first_row, first_row + len(labels)),
        row_digests=torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32),
    )


def _read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """Read a packed idx file of unsigned bytes: two zeros, the type, the number of dimensions, their sizes, the bytes.

    Raises:
        DataError: it's something else, or there are more or fewer bytes than its sizes say.
    """
    content = _unpacked(path.read_bytes(), path)
    start = 4 + 4 * num_dimensions
    if len(content) < start or content[:4] != bytes((0, 0, _UBYTE, num_dimensions)):
        msg = (
            f"{path} begins with {content[:4].hex()}: no idx file of bytes in {num_dimensions} dimensions. Get it anew."
        )
        raise DataError(msg)
    sizes = struct.unpack(f">{num_dimensions}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        msg = f"{path} says {sizes} and holds {len(content) - start} bytes, not {math.prod(sizes)}. Fetch it again."
        raise DataError(msg)
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
