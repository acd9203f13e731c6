"""Rows of encoded images as tensors, decoded no larger than they're wanted."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmati.core.source import ImageSize
from cosmati.data.ingest.images import decode_image
from cosmati.data.rows import RowBatch
from cosmati.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DecodeImages:
    """A data set's transform: images of one size, and their labels.

    `StreamingDataset(url, transform=DecodeImages(image_size=(224, 224)))` gives float32 [rows, 3, height, width] in
    [0, 1] and labels [rows]. Of each image the largest middle part of that shape is taken, and scaled with
    antialiasing. A JPEG is decoded at a half, a quarter or an eighth where that is enough; a plan's ProgressiveResizing
    asks for smaller ones while its images are small.

    Args:
        image_size: height and width in pixels.
        image: column of files (JPEG, PNG, WebP ...). Of the encodings `jpeg`, `png` and `pil`, whose images are
            decoded whole as they're read, it's only scaled.
        label: column of labels; None gives images alone.

    Raises:
        DataError: a size isn't positive.
    """

    image_size: ImageSize
    image: str = "image"
    label: str | None = "label"

    def __post_init__(self) -> None:
        """Check the size."""
        try:
            height, width = map(operator.index, self.image_size)
            if min(height, width) < 1:
                raise ValueError
        except (TypeError, ValueError):
            msg = f"image_size={self.image_size!r}: give height and width in pixels, whole numbers, each 1 or more."
            raise DataError(msg) from None
        object.__setattr__(self, "image_size", (height, width))

    def __call__(self, rows: RowBatch, image_size: ImageSize | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return images, and labels if there's a column of them.

        Args:
            rows: as read.
            image_size: in place of the transform's own.

        Raises:
            DataError: there is no such column, or an image can't be decoded.
        """
        if self.image not in rows.columns:
            raise DataError(f"There is no column {self.image!r}; the rows have {', '.join(sorted(rows.columns))}.")
        size = image_size or self.image_size
        files = zip(rows.columns[self.image], rows.row_ids.tolist(), strict=True)
        images = torch.stack([decode_image(file, name=f"row {row}", size=size) for file, row in files])
        scaled = images.float().div_(255)
        return scaled if self.label is None else (scaled, rows.tensor(self.label))
