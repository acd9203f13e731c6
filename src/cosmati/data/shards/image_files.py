"""The file that an image was opened from, so that it's stored as it is and loses nothing by being encoded again."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

_EXIF_PARTS = (0x8769, 0x8825)
"""Tags of the parts that EXIF has of its own: of the camera, and of the place."""


def image_bytes(image: Any, kind: str) -> bytes:  # noqa: ANN401  (Pillow's own class)
    """Return a PIL image as a file: the one that it was opened from, or encoded anew.

    Args:
        image: any PIL image.
        kind: `jpeg` or `png`.

    Raises:
        ValueError: files of that kind don't hold such an image; the message says why.
        OSError: the file that it was opened from can't be read.
    """
    data = image_file(image, kind)
    if data is not None:
        return data
    stream = io.BytesIO()
    try:
        image.save(stream, format=kind.upper(), **_kept_quality(image, kind))
    except OSError as error:
        if error.errno is not None:
            raise
        mend = "; convert it to another mode first, such as RGB" if "mode" in str(error) else ""
        raise ValueError(f"{error}{mend}") from error
    except SystemError as error:
        raise ValueError(str(error)) from error
    return stream.getvalue()


def image_file(image: Any, kind: str) -> bytes | None:  # noqa: ANN401  (Pillow's own class)
    """Return the bytes of the file that a PIL image was opened from; None where it isn't what is in the file.

    An image that was resized, turned or drawn on since isn't, nor one with another palette, transparency or EXIF than
    its file, nor one whose file is gone or of another kind.

    Args:
        image: as `PIL.Image.open` gives it, or anything made of that.
        kind: `jpeg` or `png`.
    """
    if (getattr(image, "format", None) or "").lower() != kind:
        return None
    data = _bytes_behind(image)
    if data is None:
        return None
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=[kind.upper()]) as again:
            is_same = again.mode == image.mode and again.size == image.size and again.tobytes() == image.tobytes()
            is_same = is_same and _beside_pixels(again) == _beside_pixels(image)
    except (OSError, ValueError, SyntaxError):
        return None
    return data if is_same else None


def _beside_pixels(image: Any) -> tuple[object, ...]:  # noqa: ANN401  (Pillow's own class)
    """Return what an image says beside its pixels, so that it compares: a fraction that is no number equals itself."""
    palette = image.getpalette("RGBA") if image.mode in {"P", "PA"} else None
    told: list[object]
    try:
        exif = image.getexif()
        told = [dict(exif), *(dict(exif.get_ifd(part)) for part in _EXIF_PARTS if part in exif)]
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, struct.error) as error:
        told = [type(error)]
    return palette, repr(sorted(image.info.items(), key=lambda item: str(item[0]))), repr(told)


def _kept_quality(image: Any, kind: str) -> dict[str, Any]:  # noqa: ANN401  (Pillow's own class)
    """Return the options that save an image of a JPEG file, whose bytes are gone, with that file's own tables."""
    is_jpeg = kind == "jpeg" and getattr(image, "format", None) == "JPEG" and getattr(image, "quantization", None)
    return {"quality": "keep"} if is_jpeg else {}


def _bytes_behind(image: Any) -> bytes | None:  # noqa: ANN401  (Pillow's own class)
    """Return what the image reads from: an open file, back where it was, or a path."""
    stream = getattr(image, "fp", None)
    if stream is not None and not stream.closed:
        place = stream.tell()
        stream.seek(0)
        data: bytes = stream.read()
        stream.seek(place)
        return data
    name = getattr(image, "filename", "")
    path = Path(name) if name else None
    return path.read_bytes() if path is not None and path.is_file() else None
