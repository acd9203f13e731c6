"""Nests of plain values as JSON and tensors, and back, exactly and without pickle.

What JSON can hold stands for itself, so most states read as they are. The rest is an object whose key `$` names its
kind: tuples, other keys than strings, bytes, NumPy's values, numbers that JSON lacks, and references to tensors.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmati.errors import CheckpointError

Json = Any
"""None, bool, int, float, str, and lists and dictionaries of these."""

_KIND = "$"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# What safetensors and PyTorch's distributed checkpoint write as it is; tensors of other types go as their bytes.
_WRITTEN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


def encode(value: object) -> tuple[Json, dict[str, Tensor]]:
    """Take a nest of plain values apart.

    Args:
        value: None, bool, int, float, str, bytes, NumPy arrays and scalars, dense tensors, and lists, tuples,
            dictionaries and sets of these. Exactly these types: a subclass would come back as another one.

    Returns:
        What JSON holds, and the tensors on CPU by their path in the nest.

    Raises:
        CheckpointError: something else, by its path and type.
    """
    tensors: dict[str, Tensor] = {}
    return _Encoder(tensors).encode(value, ()), tensors


def decode(json: Json, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401  (whatever was encoded)
    """Put together what `encode` took apart; tensors are on CPU, and share no memory with those given.

    Raises:
        CheckpointError: a tensor is missing, or the JSON isn't of `encode`'s making.
    """
    try:
        return _decode(json, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        msg = f"A saved state can't be put together: {error!r}. The checkpoint was written by another release."
        raise CheckpointError(msg) from error


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._open: list[object] = []

    def encode(self, value: Any, path: tuple[str, ...]) -> Json:  # noqa: ANN401, PLR0911  (one line a type)
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "hex": struct.pack("<d", value).hex()}
        if kind is bytes:
            return {_KIND: "bytes", "hex": value.hex()}
        if kind is Tensor and value.layout is torch.strided and not value.is_quantized:
            return self._tensor(value.detach(), path)
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.fields is None:
            return {_KIND: "scalar", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
        if kind is np.ndarray and not value.dtype.hasobject and value.dtype.fields is None:
            return self._array(value, path)
        if kind in (list, tuple, set, frozenset, dict, OrderedDict):
            if any(value is one for one in self._open):
                self._refuse(value, path, "which holds itself")
            self._open.append(value)
            try:
                return self._nest(value, path)
            finally:
                self._open.pop()
        return self._refuse(value, path, "which only pickle could write")

    def _nest(self, value: Any, path: tuple[str, ...]) -> Json:  # noqa: ANN401
        if isinstance(value, dict):
            if type(value) is dict and _KIND not in value and all(type(key) is str for key in value):
                return {key: self.encode(one, (*path, key)) for key, one in value.items()}
            pairs = [
                [self.encode(key, (*path, f"key {i}")), self.encode(one, (*path, str(key)))]
                for i, (key, one) in enumerate(value.items())
            ]
            return {_KIND: type(value).__name__, "items": pairs}
        # A set has no order of its own, and what is written should not depend on one.
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        items = [self.encode(one, (*path, str(i))) for i, one in enumerate(ordered)]
        return items if type(value) is list else {_KIND: type(value).__name__, "items": items}

    def _tensor(self, value: Tensor, path: tuple[str, ...]) -> Json:
        if value.dtype in _WRITTEN and value.numel():
            return {_KIND: "tensor", "name": self._keep(value.cpu().clone(memory_format=torch.contiguous_format), path)}
        raw = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        told = {_KIND: "tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
        return told | ({"name": self._keep(raw.clone(), path)} if raw.numel() else {})

    def _array(self, value: np.ndarray[Any, Any], path: tuple[str, ...]) -> Json:
        told = {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else None
        return told | ({} if raw is None else {"name": self._keep(raw, path)})

    def _keep(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        # Two keys may be spelled alike, 1 and "1" for one.
        name = first = "/".join(path) or "value"
        while name in self._tensors:
            name = f"{first}#{len(self._tensors)}"
        self._tensors[name] = tensor
        return name

    def _refuse(self, value: object, path: tuple[str, ...], why: str) -> Json:
        kind = type(value)
        msg = (
            f"The state at {'/'.join(path) or 'its root'!r} is a {kind.__module__}.{kind.__qualname__}, {why}. "
            "Checkpoints hold plain values: let state_dict() return numbers, strings, bytes, tensors, NumPy arrays, "
            "and lists, tuples and dictionaries of these."
        )
        raise CheckpointError(msg)


def _decode(json: Json, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401, PLR0911  (one line a kind)
    if isinstance(json, list):
        return [_decode(one, tensors) for one in json]
    if not isinstance(json, dict):
        return json
    if _KIND not in json:
        return {key: _decode(one, tensors) for key, one in json.items()}
    match json[_KIND]:
        case "float":
            return struct.unpack("<d", bytes.fromhex(json["hex"]))[0]
        case "bytes":
            return bytes.fromhex(json["hex"])
        case "scalar":
            return np.frombuffer(bytes.fromhex(json["hex"]), np.dtype(json["dtype"]))[0]
        case "array":
            raw = tensors[json["name"]].numpy().tobytes() if "name" in json else b""
            return np.frombuffer(bytearray(raw), np.dtype(json["dtype"])).reshape(json["shape"])
        case "tensor" if "dtype" not in json:
            return tensors[json["name"]].clone()
        case "tensor":
            dtype = _DTYPES[json["dtype"]]
            flat = tensors[json["name"]].clone().view(dtype) if "name" in json else torch.empty(0, dtype=dtype)
            return flat.reshape(json["shape"])
        case "dict" | "OrderedDict" as kind:
            pairs = [(_decode(key, tensors), _decode(one, tensors)) for key, one in json["items"]]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        case "tuple" | "set" | "frozenset" as kind:
            items = (_decode(one, tensors) for one in json["items"])
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
        case unknown:
            msg = f"no kind {unknown!r}"
            raise ValueError(msg)
