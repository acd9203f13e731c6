"""A worker's batch in one piece of shared memory.

PyTorch hands each tensor over by a file descriptor of its own, for which the reader connects to the worker: of a batch
with rows, labels and lineage that costs several times the reading. In a parcel all tensors lie behind one descriptor.
"""

from __future__ import annotations

import io
import math
import pickle
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cosmati.core.memory import freed_memory_kept

_ALIGNMENT = 64
_SMALL_BYTES = 1 << 16
"""Tensors up to this are copied out: who keeps row ids of a whole epoch shouldn't keep all rows' memory."""


_held: list[ExitStack] = []


class Parcel:
    """Any object whose tensors cross between processes together.

    Args:
        content: what crosses. Tensors that aren't plain ones on the CPU go PyTorch's way.
    """

    def __init__(self, content: object) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(content)
        self._text = stream.getvalue()
        self._pieces = [(offset, tensor.dtype, tensor.shape) for offset, tensor in pickler.tensors]
        # As PyTorch's own collation does: filled where it's shared, so that nothing is copied twice.
        storage = torch.UntypedStorage._new_shared(max(1, pickler.num_bytes))  # noqa: SLF001
        self._buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
        for (offset, tensor), piece in zip(pickler.tensors, self._views(), strict=True):
            assert offset % _ALIGNMENT == 0
            piece.copy_(tensor)

    def _views(self) -> list[Tensor]:
        return [
            self._buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for offset, dtype, shape in self._pieces
        ]

    def pin_memory(self, device: Any = None) -> Parcel:  # noqa: ANN401  (DataLoader's name and arguments)
        """Pin all tensors at once; DataLoader asks for it with `pin_memory=True`."""
        self._buffer = self._buffer.pin_memory()
        return self

    def unpack(self) -> Any:  # noqa: ANN401  (what was packed)
        """Return the content."""
        is_pinned = self._buffer.is_pinned()
        tensors = [view if is_pinned or view.nbytes > _SMALL_BYTES else view.clone() for view in self._views()]
        return _Unpickler(io.BytesIO(self._text), tensors).load()


class _Pickler(ForkingPickler):
    """Leaves plain tensors out, and says where each is to lie."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0
        self._number: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:  # pickle's name
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        if id(obj) not in self._number:
            self._number[id(obj)] = len(self.tensors)
            self.tensors.append((self.num_bytes, obj))
            self.num_bytes += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._number[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back. What it reads, a worker of this very program wrote."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:  # pickle's name
        return self._tensors[pid]


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_nested
    )


def in_worker(content: object) -> object:
    """Return a parcel in a worker of a DataLoader, and the content itself anywhere else."""
    if get_worker_info() is None:
        return content
    if not _held:
        # A worker reads for as long as it lives, and its batches are all alike: their memory is kept for the next one.
        _held.append(stack := ExitStack())
        stack.enter_context(freed_memory_kept())
    return Parcel(content)


def out_of_worker(content: Any) -> Any:  # noqa: ANN401  (either)
    """Return what `in_worker` was given."""
    return content.unpack() if isinstance(content, Parcel) else content
