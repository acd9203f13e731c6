"""The digest of what a step was given: tensors, arrays, strings, numbers, and objects that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from cosmati.core.sparse import sparse_parts
from cosmati.train.options import scalar_or_items
from cosmati.train.user_objects import fields_of

_MAX_DEPTH = 12
_SCALARS = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, Enum)


def content_digest(*values: object) -> bytes:
    """Return 32 bytes that are the same for the same content, in any process and on any device.

    A mapping's content has no order.
    Times, UUIDs and `tempfile`'s folders don't count, nor what no data are: functions, locks, references.
    """
    digest = hashlib.sha256()
    for part in _parts(values, ()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(value: object, within: tuple[int, ...]) -> Iterator[bytes]:
    """Yield what a value consists of.

    Args:
        value: any.
        within: `id` of each object that holds it.
    """
    yield type(value).__qualname__.encode()
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, _SCALARS):
        yield repr(scalar_or_items(value)).encode()
    elif value is None or callable(value) or len(within) > _MAX_DEPTH or id(value) in within:
        return
    elif isinstance(value, set | frozenset):
        yield from sorted(content_digest(one) for one in value)
    else:
        for child in _children(value):
            yield from _parts(child, (*within, id(value)))


def _children(value: object) -> Iterator[object]:
    if isinstance(value, np.ndarray):
        yield from value.reshape(-1).tolist()
    elif isinstance(value, Mapping):
        yield len(value)
        for key in sorted(value, key=_rank):  # Their order may follow from a set's, which each process has of its own.
            yield key
            yield value[key]
    elif isinstance(value, list | tuple):
        yield len(value)
        yield from value
    else:
        for name, field in fields_of(value).items():
            yield name
            yield field


def _rank(key: object) -> str:
    return repr(key) if isinstance(key, _SCALARS) else content_digest(key).hex()


def _of_tensor(tensor: Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype}{tensor.layout}".encode()
    tensor = tensor.detach()
    if tensor.is_nested:
        for one in tensor.unbind():
            yield from _of_tensor(one)
        return
    yield str(tuple(tensor.shape)).encode()
    if tensor.device.type == "meta" or not tensor.numel():
        return
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if parts := sparse_parts(tensor):  # dense, a graph may be larger than memory
        for part in parts:
            yield from _of_tensor(part)
        return
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
