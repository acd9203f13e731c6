"""Image folders, kept as the files are; and their decoding to tensors."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmati.data.ingest.files import Paths, file_digests, list_files
from cosmati.data.ingest.rows import ORIGIN_COLUMNS, ClassOf, OnError, OriginFile, Reading, Row, Rows
from cosmati.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MAX_PIXELS = 1 << 26
_ORIENTATION, _FIRST_ON_ITS_SIDE = 0x0112, 5
"""EXIF's tag; from 5 on, height and width change places."""
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})


def read_image_folder(
    root: Paths,
    *,
    class_of: str | ClassOf,
    with_labels: bool = True,
    label_names: Sequence[str] = (),
    verify: bool = True,
    on_error: OnError = "raise",
    max_pixels: int = _MAX_PIXELS,
) -> Rows:
    """Read folders of images: columns `image` (the file's bytes, unchanged) and `label`.

    The label is the number of the image's top folder, in the order of their names; the names stand in
    `Rows.label_names["label"]`. Several roots share their labels: `cat` below one is `cat` below
    another. Decode with `decode_image`. Files that aren't named as images are left out and counted in `Rows.left_out`.

    Args:
        root: with a folder for each label, images at any depth below it; or several of these.
        class_of: class path of all rows, or a function of a row (see `class_by_field`).
        with_labels: give a label; False takes images wherever they lie.
        label_names: labels that have their numbers already, in order; others come after them.
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
    files = [(name, file) for name, file in everything if name.lower().endswith(IMAGE_SUFFIXES)]
    if not files:
        raise DataError(
            f"{root} holds no file named {', '.join(IMAGE_SUFFIXES)}. Name the folder that holds the images."
        )
    num_others = len(everything) - len(files)
    labels = _labels(root, files) if with_labels else {}
    names = [*label_names, *sorted({*labels.values()} - {*label_names}, key=str.encode)]
    numbers = {name: number for number, name in enumerate(names)}

    def read(reading: Reading) -> Iterator[Row]:
        for name, file in files:
            try:
                data = file.read_bytes()
                sha256 = hashlib.sha256(data)
                reading.files.append(OriginFile(name, len(data), sha256.hexdigest()))
                if verify:
                    _decode(data, max_pixels)
            except (OSError, ValueError) as error:
                reading.reject(name, 1, str(error), error)
                continue
            label = {"label": numbers[labels[file]]} if with_labels else {}
            yield {"image": data, **label, "origin_file": name, "origin_place": 1, "origin_sha256": sha256.digest()}

    columns = {"image": "bytes"} | ({"label": "int"} if with_labels else {}) | dict(ORIGIN_COLUMNS)
    return Rows(
        MappingProxyType(columns),
        class_of,
        read,
        on_error,
        label_names={"label": tuple(names)} if with_labels else {},
        left_out={"not named as an image": num_others} if num_others else {},
        inputs=partial(file_digests, files),
    )


def _labels(root: Paths, files: Sequence[tuple[str, Path]]) -> dict[Path, str]:
    """Return the top folder of each file, below the root that holds it."""
    roots = [Path(root)] if isinstance(root, str | PathLike) else [Path(one) for one in root]
    found = {}
    for _, file in files:
        parts = next(file.relative_to(one).parts for one in roots if file.is_relative_to(one))
        if len(parts) < 2:
            raise DataError(
                f"{file} lies in no folder below what is read, so it has no label. Read the folder above, or use "
                "with_labels=False (--no-labels)."
            )
        found[file] = parts[0]
    return found


def decode_image(
    data: Any,  # noqa: ANN401  (Pillow is optional)
    *,
    name: str = "image",
    max_pixels: int = _MAX_PIXELS,
    at_least: int | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Decode an image: uint8 tensor [3, height, width], red, green, blue.

    Orientation by EXIF is applied. Grey is repeated, transparency is dropped, 16-bit grey keeps its higher byte, of an
    animation the first frame counts. The same bytes give the same tensor with the same Pillow and its codecs; for
    JPEG, another release of the codec may round differently.

    Args:
        data: a JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or PGM file; or an image that is decoded already, Pillow's or an
            array, uint8 [height, width, 3].
        name: of the image, for messages.
        max_pixels: refuse an image with more, before it's decoded.
        at_least: pixels that the shorter side needs. A JPEG that has twice, four or eight times as many is decoded at a
            half, a quarter or an eighth of its size, which spares the codec most of its work; other files come whole.
        size: height and width: the largest middle part of this shape is taken and scaled, with antialiasing. A JPEG is
            first decoded at the least of its fractions that isn't smaller.

    Raises:
        DataError: it isn't such an image, it's damaged or too large; or `at_least` or `size` is below 1.
        MissingExtraError: Pillow isn't installed.
    """
    import torch

    if at_least is not None and at_least < 1:
        raise DataError(f"at_least={at_least}: give the pixels of the shorter side, 1 or more, or None.")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(f"size={size}: give height and width in pixels, each 1 or more.")
    try:
        least = (at_least, at_least) if at_least else None
        pixels = _decode(data, max_pixels, size or least, fits=size is not None)
    except ValueError as error:
        raise DataError(f"{name}: {error}. Fetch it again, or leave it out.") from error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _decode(
    data: Any,  # noqa: ANN401
    max_pixels: int,
    size: tuple[int, int] | None = None,
    *,
    fits: bool = False,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uint8 [height, width, 3].

    Args:
        data: the file, or an image.
        max_pixels: of the image, whole.
        size: height and width that are enough.
        fits: scale to that size.

    Raises:
        ValueError: it can't be decoded, and why.
    """
    image_module, image_operations = _pillow()
    try:
        with _opened(data, image_module) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ValueError(f"has {width} x {height} pixels, more than max_pixels={max_pixels}")
            if size is not None:
                lies_on_its_side = image.getexif().get(_ORIENTATION, 1) >= _FIRST_ON_ITS_SIDE
                image.draft(None, size if lies_on_its_side else size[::-1])
            image.load()
            # Orientation first: converting drops it.
            image_operations.exif_transpose(image, in_place=True)
            colours = _to_rgb(image, image_module)
            if size is not None and fits:
                colours = image_operations.fit(colours, size[::-1], method=image_module.Resampling.BILINEAR)
            return np.array(colours)
    except ValueError:
        raise
    except image_module.UnidentifiedImageError as error:
        kinds = ", ".join(_FORMATS)
        raise ValueError(f"isn't an image of a known format ({kinds})") from error
    except Exception as error:
        # Decoders of damaged bytes raise whatever their parsers run into.
        raise ValueError(f"can't be decoded ({type(error).__name__}: {error})") from error


def _opened(data: Any, image_module: Any) -> Any:  # noqa: ANN401
    if isinstance(data, image_module.Image):
        return data.copy()  # it's turned in place
    if isinstance(data, np.ndarray):
        return image_module.fromarray(data)
    return image_module.open(io.BytesIO(data), formats=_FORMATS)


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
