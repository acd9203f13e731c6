"""The user's own nests of data: which of their leaves hold rows, and how rows are kept, cleared and moved.

Tensors and NumPy arrays hold one row for each index of their first dimension; those without dimensions hold none. So
does a list, or a tuple, that has no tensor in it and is as long as the batch: strings, ids, graphs. Anything else is
the same for all rows.

A list of tensors may be a list of columns, each with all rows (two views of them, say), or of rows (images of different
sizes). What stands beside it decides; the batch as a whole, where it's a list of tensors, is of columns.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cosmati.core.containers import Data, rebuilt
from cosmati.errors import BatchError


def children(data: Data) -> Iterator[Data]:
    """Yield what a container holds; nothing of a leaf."""
    if isinstance(data, PackedSequence):
        return  # Its tensors hold no rows: steps of all, one after another.
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


def nearest_tensor(data: Data) -> Tensor | None:
    """Return a tensor that holds rows, level by level: a long list of strings may stand before it."""
    level = [data]
    while level:
        for node in level:
            if isinstance(node, Tensor) and node.ndim:
                return node
        level = [child for node in level for child in children(node)]
    return None


def arrays(data: Data) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and NumPy arrays that hold rows."""
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim:
            yield data
    elif not isinstance(data, str | bytes):
        for child in children(data):
            yield from arrays(child)


def row_counts(data: Data, pieces: int = 1) -> set[int]:
    """Return the numbers of rows that a nest's arrays, lists or batch objects speak of; one, where they agree.

    Args:
        data: the nest.
        pieces: into how many equal parts it's going to be cut; where it's 1, lists that may be rows or columns are
            columns.

    Raises:
        BatchError: it's to be cut, and its lists of tensors may be rows or columns.
    """
    readings = _readings(data, is_top=True)
    if readings is not None:
        return _decided(data, readings, pieces)
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return {len(column) for column in data} if _is_columns(data) else {len(data)}
    found: set[int] = set()
    for child in children(data):
        found |= row_counts(child)
    return found or _count_object(data)


def possible_row_counts(data: Data) -> set[int]:
    """Return every number of rows that a nest may have, where lists of tensors may be rows or columns."""
    return _readings(data, is_top=True) or set()


def _length(array: Tensor | np.ndarray[Any, Any]) -> int:
    return array.size(0) if isinstance(array, Tensor) else len(array)  # A nested one has no `len`.


def _readings(node: Data, *, is_top: bool = False) -> set[int] | None:
    """Return how many rows a nest may have, so that each of its arrays has as many; None where it has no arrays."""
    if isinstance(node, PackedSequence):
        return {int(node.batch_sizes[0])}
    if isinstance(node, Tensor | np.ndarray):
        return {_length(node)} if node.ndim else None
    found = _inner_readings(node)
    return found if found is None or not _may_be_rows(node, is_top=is_top) else found | {len(node)}


def _inner_readings(node: Data) -> set[int] | None:
    """Return the numbers of rows that all a container holds may have."""
    found: set[int] | None = None
    for child in children(node):
        if isinstance(child, str | bytes | int | float):
            continue
        own = _readings(child)
        if own is not None:
            found = own if found is None else found & own
    return found


def _may_be_rows(node: Data, *, is_top: bool) -> bool:
    """Say whether a container of arrays may hold a row in each of its places.

    The batch itself is (input, target), unless its items are all of one make, as where nothing was collated.
    """
    if not isinstance(node, list | tuple) or hasattr(node, "_fields"):
        return False
    if not is_top:
        return True
    return len(node) > 1 and not isinstance(node[0], Tensor | np.ndarray) and len({_make(item) for item in node}) == 1


def _make(item: Data) -> object:
    """Return what rows of one list have in common: their type, keys, and the types of what they hold."""
    keys = tuple(item) if isinstance(item, Mapping) else ()
    return type(item), keys, tuple(type(child) for child in children(item))


def _decided(data: Data, readings: set[int], pieces: int) -> set[int]:
    """Choose among several numbers of rows the one that lists without tensors have too."""
    lengths = {_length(array) for array in arrays(data)}
    possible = {rows for rows in readings if rows and rows % pieces == 0}
    if len(possible) < 2:
        return possible or readings or lengths
    supported = possible & set(_plain_lengths(data))
    if len(supported) == 1:
        return supported
    if pieces == 1:
        return lengths if len(lengths) == 1 else readings
    msg = (
        f"A list of tensors in the batch (a {type(data).__name__}) may hold a row in each place, or all rows in each: "
        f"{' or '.join(map(str, sorted(possible)))} rows. Stack or pad rows into one tensor [rows, ...], give columns "
        "names of their own in a dictionary, or say the number: Batch(data, Lineage.of_rows(0, num_rows))."
    )
    raise BatchError(msg)


def _plain_lengths(node: Data) -> Iterator[int]:
    """Yield the lengths of the lists that have no arrays in them."""
    if isinstance(node, list | tuple) and not hasattr(node, "_fields") and next(arrays(node), None) is None:
        yield len(node)
    elif not isinstance(node, Tensor | np.ndarray | str | bytes):
        for child in children(node):
            yield from _plain_lengths(child)


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
        BatchError: a leaf that can't be cut and may hold rows (a graph, a table), or a list of tensors that may hold
            rows or columns, as long as each of them.
    """

    def keep(node: Data, *, is_top: bool = False) -> Data:
        if isinstance(node, PackedSequence) or (isinstance(node, Tensor) and not _is_dense(node)):
            _refuse_packed(node)
        if isinstance(node, Tensor):
            return node[indices] if node.ndim else node
        if isinstance(node, np.ndarray):
            return node[indices if isinstance(indices, slice) else indices.cpu().numpy()] if node.ndim else node
        if _holds_rows(node, num_rows, is_top=is_top):
            return _pick(node, indices)
        _require_constant(node)
        return rebuilt(keep, node)

    return keep(data, is_top=True)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _refuse_packed(node: Data) -> NoReturn:
    kind = f"{node.layout} tensor" if isinstance(node, Tensor) and not node.is_nested else "nested tensor"
    msg = (
        f"A {kind if isinstance(node, Tensor) else type(node).__name__} in the batch can't be cut into rows. Pad the "
        "rows into a dense tensor (.to_dense(), pad_sequence), or take V = 1 (num_microbatches=1, without elastic and "
        "policy)."
    )
    raise BatchError(msg)


def clear_rows(data: Data, gone: Tensor) -> Data:
    """Put nothing in place of some rows: zeros in arrays, empty values in lists.

    Args:
        data: the nest.
        gone: bool [rows].
    """

    def clear(node: Data, *, is_top: bool = False) -> Data:
        if isinstance(node, Tensor):
            # `masked_fill` has no unsigned types but uint8, and tokens are uint16.
            return torch.where(gone.view(-1, *[1] * (node.ndim - 1)), node.new_zeros(()), node) if node.ndim else node
        if isinstance(node, np.ndarray) and node.ndim:
            cleared = node.copy()
            cleared[gone.numpy()] = np.zeros((), node.dtype)
            return cleared
        if _holds_rows(node, len(gone), is_top=is_top):
            pairs = zip(node, gone.tolist(), strict=True)
            return type(node)(_nothing_like(row) if is_gone else row for row, is_gone in pairs)
        return rebuilt(clear, node)

    return clear(data, is_top=True)


def moved(data: Data, device: torch.device) -> Data:
    """Move the tensors of a nest, and batch objects that move themselves (`.to(device)`), to a device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if hasattr(data, "to") and not isinstance(data, Mapping):
        # Some move in place, and the user's own batch should stay where it is.
        return copy.copy(data).to(device)
    return rebuilt(lambda child: moved(child, device), data)


def _holds_rows(node: Data, num_rows: int, *, is_top: bool) -> bool:
    """Say whether a container is a list with a row in each place.

    Raises:
        BatchError: it may as well be a list of columns.
    """
    if not isinstance(node, list | tuple) or hasattr(node, "_fields") or len(node) != num_rows:
        return False
    if next(arrays(node), None) is None:
        return not (is_top and _is_columns(node))
    if not _may_be_rows(node, is_top=is_top):
        return False
    if num_rows in (_inner_readings(node) or ()):
        msg = (
            f"A {type(node).__name__} in the batch holds {num_rows} arrays of {num_rows}: a row in each place, or all "
            "rows in each, can't be told. Stack rows into one tensor [rows, ...], or give columns names of their own "
            "in a dictionary."
        )
        raise BatchError(msg)
    return True


def _pick(rows: Data, indices: Tensor | slice) -> Data:
    if isinstance(indices, slice):
        return rows[indices]
    chosen = indices.nonzero().flatten() if indices.dtype is torch.bool else indices
    return type(rows)(rows[index] for index in chosen.tolist())


def _nothing_like(row: Data) -> Data:
    if isinstance(row, Tensor):
        return torch.zeros_like(row)
    if isinstance(row, np.ndarray):
        return np.zeros_like(row)
    if next(arrays(row), None) is not None:
        return rebuilt(_nothing_like, row)
    return type(row)() if isinstance(row, str | bytes | int | float | list | tuple | dict) else None


def _require_constant(node: Data) -> None:
    """Refuse what may hold rows and can't be cut; numbers, strings and the like are the same for all rows."""
    if isinstance(node, str | bytes | np.generic | type | Mapping | list | tuple) or dataclasses.is_dataclass(node):
        return
    if hasattr(node, "to") or hasattr(node, "__getitem__") or _has_arrays(node):
        kind = type(node)
        msg = (
            f"A {kind.__module__}.{kind.__qualname__} in the batch can't be cut into rows: only tensors, arrays and "
            "lists can, alone or in tuples, dictionaries and dataclasses. Take V = 1 (num_microbatches=1, without "
            "elastic and policy), or let the loader give a list with one object a row."
        )
        raise BatchError(msg)


def _has_arrays(node: Data, depth: int = 3) -> bool:
    """Say whether an object holds arrays with rows in its attributes, or in those of objects in them."""
    if callable(node):
        return False
    slots = getattr(type(node), "__slots__", ())
    own = [getattr(node, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    for leaf in leaves([*own, *getattr(node, "__dict__", {}).values()]):
        if isinstance(leaf, Tensor | np.ndarray):
            if leaf.ndim:
                return True
        elif depth and _has_arrays(leaf, depth - 1):
            return True
    return False
