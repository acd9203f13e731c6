"""Column encodings of MDS: how a value becomes bytes, and back.

All numbers are little-endian. `docs/data.md` lists the encodings; the format is MosaicML's, version 2.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.exact_numbers import as_exact
from cosmati.data.shards.image_files import image_bytes
from cosmati.errors import DataError, MissingExtraError

_SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_CODES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}
_CODE_OF = {np.dtype("<" + name): code for code, name in _CODES.items()}
_DIMS: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))
_ARRAY_NAME = re.compile(r"ndarray(?::(?P<dtype>[a-z]+\d+)(?::(?P<shape>\d+(?:,\d+)*))?)?")


@dataclass(frozen=True)
class Encoding:
    """How one column is written.

    Attributes:
        name: as it stands in the index.
        size: bytes of each value, None where they vary.
        encode: value -> bytes; raises `DataError` for a value that isn't of this kind.
        decode: bytes -> value; raises `DataError` for bytes that aren't one.
        dtype: of the numbers, where values are an array of fixed shape or a scalar, so that a column is read at once.
        shape: of such values; () for a scalar.
        header: reads dtype, shape and length of the header of an array that carries them.
    """

    name: str
    size: int | None
    encode: Callable[[Any], bytes]
    decode: Callable[[memoryview], Any]
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    header: Callable[[memoryview], tuple[np.dtype[Any], tuple[int, ...], int]] | None = None


def encoding(name: str, *, allow_pickle: bool = False) -> Encoding:
    """Return an encoding by its name in the index.

    Args:
        name: `str`, `int`, `ndarray:int64:128`, ...
        allow_pickle: accept `pkl`, whose bytes run code when they're decoded.

    Raises:
        DataError: there is no such encoding, or it's `pkl` and that wasn't asked for.
    """
    if name == "pkl":
        if not allow_pickle:
            msg = (
                "The column is encoded as pkl: to decode it is to run whatever its writer put there. Pass "
                "allow_pickle=True if you'd let them; better, have it written as json or ndarray."
            )
            raise DataError(msg)
        return _pickle()
    return _encoding(name)


@lru_cache(maxsize=512)
def _encoding(name: str) -> Encoding:
    if name in _SIMPLE:
        return _SIMPLE[name]()
    if name in _SCALARS or name == "int":
        return _scalar(name)
    match = _ARRAY_NAME.fullmatch(name)
    if match:
        return _array(name, match["dtype"], match["shape"])
    known = sorted([*_SIMPLE, *_SCALARS, "int", "ndarray[:dtype[:shape]]", "pkl"])
    raise DataError(f"{name!r} is no encoding of MDS version 2. There are: {', '.join(known)}.")


def _refuse(name: str, value: object, why: str) -> DataError:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number"
    return DataError(f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__}) isn't {name}: {why}.")


def _text(data: memoryview, name: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{len(data)} bytes aren't {name}: {error}.") from error


def _bytes() -> Encoding:
    def encode(value: object) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _refuse("bytes", value, "give bytes")
        return bytes(value)

    return Encoding("bytes", None, encode, bytes)


def _str() -> Encoding:
    def encode(value: object) -> bytes:
        if not isinstance(value, str):
            raise _refuse("str", value, "give a string")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise _refuse("str", value, f"UTF-8 has no lone surrogate, and it has one at {error.start}") from error

    return Encoding("str", None, encode, lambda data: _text(data, "UTF-8"))


def _printed(name: str, kinds: type | tuple[type, ...], parse: Callable[[str], Any]) -> Encoding:
    """Numbers as decimal text."""

    def encode(value: object) -> bytes:
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise _refuse(name, value, "give a number of that kind")
        # NumPy's scalars print with their type's name.
        plain = value.item() if isinstance(value, np.generic) else value
        try:
            text = str(plain)
            is_same = not isinstance(plain, int) or parse(text) == plain
        except (ValueError, OverflowError) as error:
            raise _refuse(name, value, str(error)) from error
        if not is_same:
            raise _refuse(name, value, f"it would be read as {parse(text)}")
        return text.encode()

    def decode(data: memoryview) -> object:
        try:
            return parse(_text(data, name))
        except (ValueError, ArithmeticError) as error:
            raise DataError(f"{bytes(data[:40])!r} isn't {name}: {error}.") from error

    return Encoding(name, None, encode, decode)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _json() -> Encoding:
    def encode(value: object) -> bytes:
        try:
            return json.dumps(value, sort_keys=True, default=_plain).encode()
        except (TypeError, ValueError) as error:
            raise _refuse("json", value, str(error)) from error

    def decode(data: memoryview) -> object:
        try:
            return json.loads(_text(data, "json"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{bytes(data[:40])!r} isn't JSON: {error}.") from error

    return Encoding("json", None, encode, decode)


def _pickle() -> Encoding:
    import pickle

    return Encoding("pkl", None, pickle.dumps, pickle.loads)


def _scalar(name: str) -> Encoding:
    dtype = np.dtype("int64" if name == "int" else name).newbyteorder("<")

    def encode(value: object) -> bytes:
        array = np.asarray(value)
        is_whole = dtype.kind in "iu" and array.dtype.kind in "iub"
        if array.shape or array.dtype.kind not in "iubf" or (dtype.kind in "iu" and not is_whole):
            raise _refuse(name, value, "give one number")
        limits = np.iinfo(dtype) if dtype.kind in "iu" else None
        if limits and not limits.min <= int(array) <= limits.max:
            raise _refuse(name, value, f"it holds {limits.min} to {limits.max}")
        return array.astype(dtype).tobytes() if limits else _exact_bytes(name, value, dtype)

    def decode(data: memoryview) -> object:
        _expect(name, len(data), dtype.itemsize)
        value = np.frombuffer(data, dtype)[0]
        return int(value) if name == "int" else value

    return Encoding(name, dtype.itemsize, encode, decode, dtype, ())


def _expect(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise DataError(f"A value of {name} has {found} bytes where {wanted} were due: the row is damaged.")


def _array(name: str, dtype_name: str | None, shape_text: str | None) -> Encoding:
    if dtype_name is not None and dtype_name not in _SCALARS:
        raise DataError(f"{name!r} names no dtype of MDS. There are: {', '.join(_SCALARS)}.")
    dtype = None if dtype_name is None else np.dtype(dtype_name).newbyteorder("<")
    if shape_text is None:
        return Encoding(
            name,
            None,
            lambda value: _dump_array(name, value, dtype),
            lambda data: _load_array(data, dtype),
            header=lambda data: array_layout(data, dtype),
        )
    assert dtype is not None, "the pattern wants a dtype before a shape"
    shape = tuple(int(size) for size in shape_text.split(","))
    size = math.prod(shape) * dtype.itemsize
    if not size:
        raise DataError(f"{name!r} has a dimension of 0. Leave the shape out for arrays that vary.")

    def encode(value: object) -> bytes:
        array = _as_array(name, value)
        if array.shape != shape:
            raise _refuse(name, value, f"its shape is {array.shape} and its dtype {array.dtype}")
        return _exact_bytes(name, value, dtype)

    def decode(data: memoryview) -> object:
        _expect(name, len(data), size)
        return np.frombuffer(data, dtype).reshape(shape)

    return Encoding(name, size, encode, decode, dtype, shape)


def _as_array(name: str, value: object) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise _refuse(name, value, str(error)) from error


def _dump_array(name: str, value: object, dtype: np.dtype[Any] | None) -> bytes:
    array = _as_array(name, value)
    own = array.dtype.newbyteorder("<") if dtype is None else dtype
    if own not in _CODE_OF:
        raise _refuse(name, value, f"its dtype is {array.dtype}")
    if not array.ndim or array.ndim > 63 or 0 in array.shape:
        raise _refuse(name, value, f"its shape is {array.shape}; arrays have dimensions, and none of 0")
    width = next(k for k, kind in enumerate(_DIMS) if max(array.shape) < 1 << 8 * kind.itemsize)
    head = b"" if dtype is not None else bytes([_CODE_OF[own]])
    head += bytes([array.ndim << 2 | width]) + np.asarray(array.shape, _DIMS[width]).tobytes()
    return head + _exact_bytes(name, value, own)


def _exact_bytes(name: str, value: object, dtype: np.dtype[Any]) -> bytes:
    try:
        return as_exact(value, dtype).tobytes()
    except ValueError as error:
        raise _refuse(name, value, str(error)) from error


def array_layout(data: memoryview, dtype: np.dtype[Any] | None) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and length of the header of an array that carries them.

    Raises:
        DataError: the header doesn't fit the bytes.
    """
    start = 0
    if dtype is None:
        if not len(data) or data[0] not in _CODES:
            raise DataError("An array starts with no dtype of MDS: the row is damaged.")
        dtype, start = np.dtype("<" + _CODES[data[0]]), 1
    if len(data) <= start:
        raise DataError("An array ends before its shape: the row is damaged.")
    ndim, kind = data[start] >> 2, _DIMS[data[start] & 3]
    stop = start + 1 + ndim * kind.itemsize
    if len(data) < stop:
        raise DataError("An array ends before its shape does: the row is damaged.")
    shape = tuple(int(size) for size in np.frombuffer(data[start + 1 : stop], kind))
    if not ndim or math.prod(shape) * dtype.itemsize != len(data) - stop:
        raise DataError(
            f"An array says shape {shape} of {dtype}, and has {len(data) - stop} bytes: the row is damaged."
        )
    return dtype, shape, stop


def _load_array(data: memoryview, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    own, shape, start = array_layout(data, dtype)
    return np.frombuffer(data[start:], own).reshape(shape)


def _pillow() -> Any:  # noqa: ANN401  (a module)
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Images need Pillow: pip install 'cosmati[vision]'.") from error
    return Image


def _open_image(data: memoryview, name: str) -> Any:  # noqa: ANN401  (Pillow's own class)
    image_module = _pillow()
    try:
        image = image_module.open(io.BytesIO(data))
        image.load()
    except Exception as error:
        raise DataError(f"{len(data)} bytes aren't an image of the encoding {name}: {error}.") from error
    return image


def _compressed_image(name: str) -> Encoding:
    def encode(value: Any) -> bytes:  # noqa: ANN401  (Pillow's own class)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not hasattr(value, "save"):
            raise _refuse(name, value, "give a PIL image, or the bytes of its file")
        try:
            return image_bytes(value, name)
        except ValueError as error:
            raise _refuse(name, value, str(error)) from error

    return Encoding(name, None, encode, lambda data: _open_image(data, name))


def _raw_image() -> Encoding:
    def encode(value: Any) -> bytes:  # noqa: ANN401  (Pillow's own class)
        if not hasattr(value, "tobytes") or not hasattr(value, "mode"):
            raise _refuse("pil", value, "give a PIL image")
        if value.mode in {"P", "PA"}:
            raise _refuse("pil", value, "it has no place for the palette; convert it first, or write png")
        mode, pixels = value.mode.encode(), value.tobytes()
        return b"".join([struct.pack("<III", value.width, value.height, len(mode)), mode, pixels])

    def decode(data: memoryview) -> object:
        if len(data) < 12:
            raise DataError("A pil image ends within its head: the row is damaged.")
        width, height, length = struct.unpack("<III", data[:12])
        try:
            return _pillow().frombytes(
                _text(data[12 : 12 + length], "pil"), (width, height), bytes(data[12 + length :])
            )
        except (ValueError, MemoryError, OverflowError) as error:
            raise DataError(f"A pil image of {width} x {height} doesn't fit its {len(data)} bytes: {error}.") from error

    return Encoding("pil", None, encode, decode)


def _image_list(name: str, item: Callable[[], Encoding], *, leading_zero: bool) -> Encoding:
    def encode(value: Any) -> bytes:  # noqa: ANN401  (a list of images)
        if not isinstance(value, list | tuple):
            raise _refuse(name, value, "give a list of images")
        parts = [item().encode(one) for one in value]
        head = [0] * leading_zero + [len(parts), *map(len, parts)]
        return np.asarray(head, "<u4").tobytes() + b"".join(parts)

    def decode(data: memoryview) -> object:
        start = 4 * leading_zero
        if len(data) < start + 4:
            raise DataError(f"A value of {name} ends within its head: the row is damaged.")
        count = int(np.frombuffer(data[start : start + 4], "<u4")[0])
        head = start + 4 + 4 * count
        sizes = np.frombuffer(data[start + 4 : head], "<u4").astype(np.int64) if len(data) >= head else None
        if sizes is None or int(sizes.sum()) != len(data) - head:
            raise DataError(f"A value of {name} says {count} images, which don't fit its {len(data)} bytes.")
        stops = head + np.cumsum(sizes)
        return [item().decode(data[stop - size : stop]) for stop, size in zip(stops, sizes, strict=True)]

    return Encoding(name, None, encode, decode)


_SIMPLE: dict[str, Callable[[], Encoding]] = {
    "bytes": _bytes,
    "str": _str,
    "str_int": lambda: _printed("str_int", (int, np.integer), int),
    "str_float": lambda: _printed("str_float", (float, int, np.floating), float),
    "str_decimal": lambda: _printed("str_decimal", Decimal, Decimal),
    "json": _json,
    "pil": _raw_image,
    "jpeg": lambda: _compressed_image("jpeg"),
    "png": lambda: _compressed_image("png"),
    "list[pil]": lambda: _image_list("list[pil]", _raw_image, leading_zero=True),
    "list[jpeg]": lambda: _image_list("list[jpeg]", lambda: _compressed_image("jpeg"), leading_zero=True),
    "list[png]": lambda: _image_list("list[png]", lambda: _compressed_image("png"), leading_zero=True),
    "jpeg_array": lambda: _image_list("jpeg_array", lambda: _compressed_image("jpeg"), leading_zero=False),
    "jpegarray": lambda: _image_list("jpegarray", lambda: _compressed_image("jpeg"), leading_zero=False),
}
