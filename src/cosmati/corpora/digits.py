"""Handwritten digits: 1,797 real images that come with scikit-learn.

Source: E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, doi 10.24432/C50P49, licence CC BY 4.0. scikit-learn ships the repository's test part: 13
writers, 8x8 pixels of 17 grey levels. The split is by image, so every writer is on both sides, and accuracy
says nothing about new writers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cosmati.errors import DataError, MissingExtraError
from cosmati.provenance.taxonomy import software_licences

NATIVE_SIZE = 8
PIXEL_MEAN = 0.3053
PIXEL_STD = 0.3760
"""Over all native images, of grey levels in [0, 1]: constants, so no split's statistics enter the other."""

_MAX_GREY = 16


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Images and their labels; all tensors are on the CPU.

    Attributes:
        images: float32 [rows, 1, size, size], normalised.
        targets: int64 [rows], the digit.
        class_ids: int64 [rows], index into the data's `class_names`.
        row_ids: int64 [rows], the image's place in scikit-learn's file.
        row_digests: uint8 [rows, 32], SHA-256 of the 64 native grey levels and the label, a byte each; the
            same at every size.
    """

    images: Tensor
    targets: Tensor
    class_ids: Tensor
    row_ids: Tensor
    row_digests: Tensor


@dataclass(frozen=True, eq=False)
class Digits:
    """The digits in two parts, with the classes of `software_licences`; all rows are `open/permissive`."""

    train: ImageRows
    validation: ImageRows
    class_names: tuple[str, ...]


def load_digits_images(size: int = 32, *, held_out_fraction: float = 0.25, label_fraction: float = 1.0) -> Digits:
    """Load the digits and split them, digit by digit, by a hash of their index.

    Args:
        size: pixels a side; other than 8, images are interpolated bilinearly.
        held_out_fraction: fraction of each digit's images that are held out.
        label_fraction: fraction of each digit's other images to train on; fewer rows make a harder task.
            Smaller fractions take subsets of larger ones.

    Raises:
        DataError: an argument is out of range.
        MissingExtraError: scikit-learn isn't installed.
    """
    if size < 1 or not 0 < held_out_fraction < 1 or not 0 < label_fraction <= 1:
        msg = (
            f"size={size}, held_out_fraction={held_out_fraction}, label_fraction={label_fraction}: use a "
            "positive size, a held-out fraction inside (0, 1) and a label fraction in (0, 1]."
        )
        raise DataError(msg)
    pixels, labels = _read()
    train: list[int] = []
    validation: list[int] = []
    for digit in np.unique(labels):
        indices = sorted(np.flatnonzero(labels == digit).tolist(), key=_hash)
        held = round(len(indices) * held_out_fraction)
        kept = round((len(indices) - held) * label_fraction)
        validation += indices[:held]
        train += indices[held : held + kept]
    if not train or not validation:
        msg = "The fractions leave no image to train on or none to validate with. Choose less extreme ones."
        raise DataError(msg)
    taxonomy = software_licences()
    class_id = taxonomy.id_of("open/permissive")
    return Digits(
        _rows(pixels, labels, train, size, class_id),
        _rows(pixels, labels, validation, size, class_id),
        taxonomy.classes,
    )


def _read() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return grey levels [rows, 8, 8] and labels [rows]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        msg = "The digits come with scikit-learn, which isn't installed. Run: pip install 'cosmati[vision]'"
        raise MissingExtraError(msg) from error
    data = load_digits()
    return data.images.astype(np.uint8), data.target.astype(np.uint8)


def _hash(index: int) -> bytes:
    return hashlib.sha256(f"digits {index}".encode()).digest()


def _rows(
    pixels: NDArray[np.uint8], labels: NDArray[np.uint8], indices: list[int], size: int, class_id: int
) -> ImageRows:
    rows = np.sort(np.asarray(indices, np.int64))
    content = [pixels[row].tobytes() + labels[row].tobytes() for row in rows]
    digests = b"".join(hashlib.sha256(row).digest() for row in content)
    images = torch.from_numpy(pixels[rows]).float()[:, None] / _MAX_GREY
    if size != NATIVE_SIZE:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return ImageRows(
        images=(images - PIXEL_MEAN) / PIXEL_STD,
        targets=torch.from_numpy(labels[rows].astype(np.int64)),
        class_ids=torch.full((len(rows),), class_id),
        row_ids=torch.from_numpy(rows),
        row_digests=torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, 32),
    )
