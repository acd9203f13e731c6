"""The user's own nests of data: which of their leaves hold rows, and how rows are kept, cleared and moved.

Tensors and NumPy arrays hold one row for each index of their first dimension; those without dimensions hold none. So
does a list, or a tuple, that has no tensor in it and is as long as the batch: strings, ids, graphs. Anything else is
the same for all rows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmati.errors import BatchError

Data = Any
"""The user's own structure of tensors: no narrower type exists."""


def rebuilt(function: Callable[[Data], Data], data: Data) -> Data:
    """Return a container of the same type with a function applied to each child; a leaf as it is."""
    if isinstance(data, Mapping):
        made = copy.copy(data) if isinstance(data, MutableMapping) else dict(data)
        for name, value in data.items():
            made[name] = function(value)
        return made
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(function(value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(function(value) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        # A field that the class computes itself follows from the others.
        names = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{name: function(getattr(data, name)) for name in names})
    return data


def children(data: Data) -> Iterator[Data]:
    """Yield what a container holds; nothing of a leaf."""
    if isinstance(data, Mapping):
        yield from data.values()
    elif isinstance(data, list | tuple):
        yield from data
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        yield from (getattr(data, field.name) for field in dataclasses.fields(data))


def leaves(data: Data) -> Iterator[Data]:
    """Yield everything that isn't a container, in order."""
    if isinstance(data, Mapping | list | tuple) or (dataclasses.is_dataclass(data) and not isinstance(data, type)):
        for child in children(data):
            yield from leaves(child)
    else:
        yield data


def arrays(data: Data) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and NumPy arrays that hold rows."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim:
            yield data
    elif not isinstance(data, str | bytes):
        for child in children(data):
            yield from arrays(child)


def row_counts(data: Data) -> set[int]:
    """Return the numbers of rows that a nest's arrays, lists or batch objects speak of; one, where they agree."""
    found = {len(array) for array in arrays(data)}
    if found:
        return found
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return {len(column) for column in data} if _is_columns(data) else {len(data)}
    for child in children(data):
        found |= row_counts(child)
    return found or _count_object(data)


def _is_columns(data: Data) -> bool:
    """Say whether lists are columns, as PyTorch's collation makes them of strings, rather than rows."""
    return len(data) > 0 and all(isinstance(child, list | tuple) for child in data)


def _count_object(data: Data) -> set[int]:
    """Ask a batch object for its rows: graphs and rows by the names that libraries give them, else its tensors."""
    if isinstance(data, Tensor | np.ndarray | str | bytes | Mapping | tuple):
        return set()
    for name in ("num_graphs", "batch_size"):
        size = getattr(data, name, None)
        size = size[0] if isinstance(size, tuple) and size else size
        if isinstance(size, int):
            return {size}
    if hasattr(data, "__len__"):
        return {len(data)}
    return {len(array) for array in arrays(getattr(data, "__dict__", {}))}


def select_rows(data: Data, indices: Tensor | slice, num_rows: int) -> Data:
    """Keep some rows of a nest.

    Args:
        data: the nest.
        indices: a slice, int64 [kept], or a bool mask [num_rows].
        num_rows: rows that the nest holds.

    Raises:
        BatchError: a leaf that can't be cut and may hold rows (a graph, a table).
    """

    def keep(node: Data) -> Data:
        if isinstance(node, Tensor):
            return node[indices] if node.ndim else node
        if isinstance(node, np.ndarray):
            return node[indices if isinstance(indices, slice) else indices.cpu().numpy()] if node.ndim else node
        if _holds_rows(node, num_rows):
            return _pick(node, indices)
        _require_constant(node)
        return rebuilt(keep, node)

    is_text = isinstance(data, list | tuple) and _is_columns(data) and next(arrays(data), None) is None
    return rebuilt(keep, data) if is_text else keep(data)


def clear_rows(data: Data, gone: Tensor) -> Data:
    """Put nothing in place of some rows: zeros in arrays, empty values in lists.

    Args:
        data: the nest.
        gone: bool [rows].
    """

    def clear(node: Data) -> Data:
        if isinstance(node, Tensor):
            return node.masked_fill(gone.view(-1, *[1] * (node.ndim - 1)), 0) if node.ndim else node
        if isinstance(node, np.ndarray) and node.ndim:
            cleared = node.copy()
            cleared[gone.numpy()] = np.zeros((), node.dtype)
            return cleared
        if _holds_rows(node, len(gone)):
            pairs = zip(node, gone.tolist(), strict=True)
            return type(node)(_nothing_like(row) if is_gone else row for row, is_gone in pairs)
        return rebuilt(clear, node)

    return clear(data)


def moved(data: Data, device: torch.device) -> Data:
    """Move the tensors of a nest, and batch objects that move themselves (`.to(device)`), to a device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if hasattr(data, "to") and not isinstance(data, Mapping):
        # Some move in place, and the user's own batch should stay where it is.
        return copy.copy(data).to(device)
    return rebuilt(lambda child: moved(child, device), data)


def _holds_rows(node: Data, num_rows: int) -> bool:
    is_list = isinstance(node, list | tuple) and not hasattr(node, "_fields")
    return is_list and len(node) == num_rows and next(arrays(node), None) is None


def _pick(rows: Data, indices: Tensor | slice) -> Data:
    if isinstance(indices, slice):
        return rows[indices]
    chosen = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
    return type(rows)(rows[index] for index in chosen.tolist())


def _nothing_like(row: Data) -> Data:
    return type(row)() if isinstance(row, str | bytes | int | float | list | tuple | dict) else None


def _require_constant(node: Data) -> None:
    """Refuse what may hold rows and can't be cut; numbers, strings and the like are the same for all rows."""
    if isinstance(node, str | bytes | np.generic | type | Mapping | list | tuple) or dataclasses.is_dataclass(node):
        return
    if hasattr(node, "to") or hasattr(node, "__getitem__"):
        kind = type(node)
        msg = (
            f"A {kind.__module__}.{kind.__qualname__} in the batch can't be cut into rows: only tensors, arrays and "
            "lists can. Take V = 1 (num_microbatches=1, without elastic and policy), or let the loader give a list "
            "with one object a row."
        )
        raise BatchError(msg)
