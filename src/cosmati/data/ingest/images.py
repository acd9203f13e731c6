"""Image folders, kept as the files are; and their decoding to tensors."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmati.data.ingest.files import list_files
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, Reading, Row, Rows
from cosmati.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MAX_PIXELS = 1 << 26
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})


def read_image_folder(
    root: str | Path,
    *,
    class_of: str | ClassOf,
    with_labels: bool = True,
    verify: bool = True,
    on_error: OnError = "raise",
    max_pixels: int = _MAX_PIXELS,
) -> Rows:
    """Read a folder of images: columns `image` (the file's bytes, unchanged) and `label`.

    The label is the number of the image's top folder, in the order of their names; the names stand in
    `Rows.label_names["label"]`. Decode with `decode_image`. Files that aren't named as images are left out and counted
    in `Rows.left_out`.

    Args:
        root: with a folder for each label, images at any depth below it.
        class_of: class path of all rows, or a function of a row (see `class_by_field`).
        with_labels: give a label; False takes images wherever they lie.
        verify: decode each image, so that what can't be decoded is found now and not while training.
        on_error: `raise` at a bad image, or leave it out and `record` it in `Rows.skipped`.
        max_pixels: an image with more is bad (only with `verify`).

    Raises:
        DataError: there are no images, or with labels one lies in no folder.
        MissingExtraError: Pillow isn't installed, and images are to be verified.
    """
    if verify:
        _pillow()
    everything = list_files(root, [""])
    files = [(name, file) for name, file in everything if name.lower().endswith(_SUFFIXES)]
    if not files:
        raise DataError(f"{root} holds no file named {', '.join(_SUFFIXES)}. Name the folder that holds the images.")
    num_others = len(everything) - len(files)
    names = sorted({name.split("/")[0] for name, _ in files}, key=str.encode) if with_labels else []
    loose = [name for name, _ in files if "/" not in name]
    if with_labels and loose:
        others = f"{loose[0]} and {len(loose) - 1} more"
        raise DataError(f"{root}: {others} lie in no folder, so they have no label. Use with_labels=False.")
    numbers = {name: number for number, name in enumerate(names)}

    def read(reading: Reading) -> Iterator[Row]:
        for name, file in files:
            try:
                data = file.read_bytes()
                if verify:
                    _decode(data, max_pixels)
            except (OSError, ValueError) as error:
                reading.reject(name, 1, str(error))
                continue
            label = {"label": numbers[name.split("/")[0]]} if with_labels else {}
            sha256 = hashlib.sha256(data).digest()
            yield {"image": data, **label, "origin_file": name, "origin_place": 1, "origin_sha256": sha256}

    columns = {"image": "bytes"} | ({"label": "int"} if with_labels else {}) | dict(ORIGIN_COLUMNS)
    return Rows(
        MappingProxyType(columns),
        class_of,
        read,
        on_error,
        label_names={"label": tuple(names)} if with_labels else {},
        left_out={"not named as an image": num_others} if num_others else {},
    )


def decode_image(data: bytes, *, name: str = "image", max_pixels: int = _MAX_PIXELS) -> Tensor:
    """Decode an image: uint8 tensor [3, height, width], red, green, blue.

    Orientation by EXIF is applied. Grey is repeated, transparency is dropped, 16-bit grey keeps its higher byte, of an
    animation the first frame counts. The same bytes give the same tensor with the same Pillow and its codecs; for
    JPEG, another release of the codec may round differently.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or PGM file.
        name: of the image, for messages.
        max_pixels: refuse an image with more, before it's decoded.

    Raises:
        DataError: it isn't such an image, it's damaged or too large.
        MissingExtraError: Pillow isn't installed.
    """
    import torch

    try:
        pixels = _decode(data, max_pixels)
    except ValueError as error:
        raise DataError(f"{name}: {error}. Fetch it again, or leave it out.") from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _decode(data: bytes, max_pixels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uint8 [height, width, 3].

    Raises:
        ValueError: it can't be decoded, and why.
    """
    image_module, image_operations = _pillow()
    try:
        with image_module.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ValueError(f"has {width} x {height} pixels, more than max_pixels={max_pixels}")
            image.load()
            # Orientation first: converting drops it.
            upright = image_operations.exif_transpose(image)
            return np.array(_to_rgb(upright, image_module))
    except ValueError:
        raise
    except image_module.UnidentifiedImageError as error:
        kinds = ", ".join(_FORMATS)
        raise ValueError(f"isn't an image of a known format ({kinds})") from error
    except Exception as error:
        # Decoders of damaged bytes raise whatever their parsers run into.
        raise ValueError(f"can't be decoded ({type(error).__name__}: {error})") from error


def _to_rgb(image: Any, image_module: Any) -> Any:  # noqa: ANN401  (Pillow is optional)
    if image.mode.startswith("I;16"):
        return image_module.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode not in _MODES:
        raise ValueError(f"has the pixel format {image.mode!r}, which 8 bits a channel can't hold; convert it first")
    # Palettes with several transparent colours: Pillow wants the way by RGBA.
    return (image.convert("RGBA") if image.mode in {"P", "PA"} else image).convert("RGB")


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        msg = "Decoding images needs Pillow, which isn't installed. Run: pip install 'cosmati[vision]'"
        raise MissingExtraError(msg) from error
    return Image, ImageOps
