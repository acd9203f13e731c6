"""A batch and where its rows come from.

`Batch.data` is whatever the user's loss reads: a tensor, tuple, dict, dataclass or any nest of them, with one row
for each index of every tensor's first dimension (`nest.py` says what else holds rows). `Batch.lineage` says which row
of which source each one is, and goes through every method together with the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cosmati.core.containers import Data, rebuilt, with_fields, with_items
from cosmati.core.lineage import TOMBSTONE, Lineage, check_lineage, renumbered
from cosmati.core.nest import (
    clear_rows,
    leaves,
    moved,
    nearest_tensor,
    possible_row_counts,
    row_counts,
    select_rows,
)
from cosmati.errors import BatchError

__all__ = [
    "TOMBSTONE", "Batch", "Data", "InputKind", "Lineage", "bury", "count_rows", "count_rows_and_tokens",
    "first_tensor", "input_of", "iterate_tensors", "kind_of_input", "map_tensors", "target_of",
]  # fmt: skip

_SEQUENCES = (list, tuple)
_INPUT_NAMES = ("input", "inputs", "x", "image", "images", "input_ids", "tokens", "pixel_values")
_TARGET_NAMES = ("target", "targets", "y", "label", "labels")


def map_tensors(function: Callable[[Tensor], Tensor], data: Data) -> Data:
    """Apply a function to every tensor of a nest of tuples, lists, mappings and dataclasses."""
    if isinstance(data, Tensor):
        return function(data)
    return rebuilt(lambda child: map_tensors(function, child), data)


def iterate_tensors(data: Data) -> Iterator[Tensor]:
    """Yield every tensor of a nest, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, data)
    yield from found


def first_tensor(data: Data) -> Tensor | None:
    """Return the first tensor that holds rows, without walking the rest of an ordinary nest; None where none does."""
    first = data
    while not isinstance(first, Tensor):
        if isinstance(first, _SEQUENCES) and first and not isinstance(first, PackedSequence):
            first = first[0]
        elif isinstance(first, Mapping):
            first = next(iter(first.values()), None)
        else:
            return nearest_tensor(data)
    return first if first.ndim else nearest_tensor(data)


def count_rows_and_tokens(data: Data) -> tuple[int, int]:
    """Return rows and tokens of a nest, read off its first tensor; rows that aren't sequences are a token each.

    Raises:
        BatchError: nothing in it can be counted.
    """
    tensor = first_tensor(data)
    if tensor is None:
        is_scalar = any(isinstance(leaf, Tensor) for leaf in leaves(data))
        rows = 1 if is_scalar else count_rows(data)
        return rows, rows
    rows = tensor.size(0)
    if _in_list(data):
        found = row_counts(data)
        if found != {rows}:
            rows = found.pop() if len(found) == 1 else rows
            return rows, rows
    return rows, tensor.numel() if tensor.ndim == 2 and not tensor.is_floating_point() else rows


def _in_list(data: Data) -> bool:
    """Say whether a nest's first leaf is in a list within the batch, which may be a row's."""
    if isinstance(data, _SEQUENCES):
        data = data[0] if data else None
    elif isinstance(data, Mapping):
        data = next(iter(data.values()), None)
    return isinstance(data, _SEQUENCES)


InputKind = Literal["images", "tokens", "features"]


def kind_of_input(data: Data) -> InputKind | None:
    """Return what a nest's first tensor looks like: images [n, c, h, w], integer tokens or features [n, length]."""
    tensor = first_tensor(data)
    if tensor is None or tensor.ndim not in (2, 4):
        return None
    if tensor.ndim == 2:
        return "features" if tensor.is_floating_point() else "tokens"
    return "images"


def count_rows(data: Data, pieces: int = 1) -> int:
    """Return the number of rows that every tensor and array of the nest agrees on; without any, every list.

    Args:
        data: the nest.
        pieces: into how many equal parts it's going to be cut.

    Raises:
        BatchError: nothing that can be counted, or different numbers; or, where it's to be cut, two numbers that are
            both possible.
    """
    lengths = row_counts(data, pieces)
    if len(lengths) != 1:
        msg = (
            f"A batch needs tensors that share their first dimension; found lengths {sorted(lengths)} in a "
            f"{type(data).__name__}. Stack or pad the rows into tensors [rows, ...] first, or give a "
            "Batch(data, Lineage.of_rows(0, num_rows))."
        )
        raise BatchError(msg)
    return lengths.pop()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows and their lineage. Methods take one and return a new one.

    Attributes:
        data: the user's nest of tensors, each [rows, ...].
        lineage: where the rows come from.
        class_id: the one class of all rows, where the microbatch is route-pure; None otherwise.
        band: the one quality band of all rows within their class, as their source says.
    """

    data: Data
    lineage: Lineage
    class_id: int | None = None
    band: int = 0

    @property
    def num_rows(self) -> int:
        """Rows, tombstones included."""
        return self.lineage.num_rows

    @property
    def present(self) -> Tensor | None:
        """Mask of rows that aren't tombstones, bool [rows] on CPU; None where all are there."""
        mask = self.lineage.row_ids != TOMBSTONE
        return None if bool(mask.all()) else mask

    def check(self) -> None:
        """Compare what a user has put together: lineage and data have to speak of the same rows.

        Raises:
            BatchError: the message says what differs. Data whose tensors have several lengths (graphs) aren't counted.
        """
        if isinstance(self.class_id, bool) or not isinstance(self.class_id, int | np.integer | None):
            msg = f"Batch.class_id = {self.class_id!r} is no id. Give an int, an index into the classes, or None."
            raise BatchError(msg)
        if self.lineage.is_known:
            check_lineage(self.lineage)
        lengths = row_counts(self.data)
        if len(lengths) == 1 and self.num_rows not in lengths | possible_row_counts(self.data):
            msg = (
                f"The batch's data have {lengths.pop()} rows, and its lineage {self.num_rows}: some would be left "
                "out, or taught as others. Give one row id and one class id for each row."
            )
            raise BatchError(msg)

    def select(self, indices: Tensor | slice) -> Batch:
        """Keep some rows, in the order given."""
        data = select_rows(self.data, indices, self.num_rows)
        return Batch(data, self.lineage.select(indices), self.class_id, self.band)

    def numbered_by(self, class_names: Sequence[str]) -> Batch:
        """Return the batch with class ids that index these names, where its lineage says the names of its own.

        Raises:
            BatchError: a class isn't among them.
        """
        lineage, names = self.lineage.numbered_by(class_names), self.lineage.class_names
        if lineage is self.lineage or names is None:
            return self
        announced = self.class_id
        if announced is not None:
            announced = int(renumbered(torch.tensor(announced), names, class_names))
        return Batch(self.data, lineage, announced, self.band)

    def to(self, device: torch.device) -> Batch:
        """Move the data; lineage stays on CPU."""
        return dataclasses.replace(self, data=moved(self.data, device))

    def replace(self, *, lineage: Lineage | None = None, **fields: Any) -> Batch:  # noqa: ANN401  (see Data)
        """Return a batch with another `input=`, `target=` or lineage."""
        data = self.data
        for field, value in fields.items():
            data = _replace_field(data, field, value)
        return Batch(data, lineage or self.lineage, self.class_id, self.band)

    @property
    def input(self) -> Data:
        """What the model reads: element 0 of a tuple, or the field named input, x, image, input_ids, pixel_values."""
        return input_of(self.data)

    @property
    def target(self) -> Data:
        """What the loss compares with: element 1 of a tuple, or the field named target, y, label, labels."""
        return target_of(self.data)

    @property
    def num_tokens(self) -> int:
        """Tokens of an integer input [rows, length]; rows otherwise."""
        return count_rows_and_tokens(self.data)[1]


def bury(batch: Batch, gone: Tensor) -> Batch:
    """Put tombstones in place of some rows: canonical shape, content zero, weight zero.

    Args:
        batch: the rows.
        gone: bool [rows].
    """
    return Batch(clear_rows(batch.data, gone), batch.lineage.without(gone), batch.class_id, batch.band)


def input_of(data: Data) -> Data:
    """Return what the model reads (see `Batch.input`)."""
    return _read(data, _field(data, "input"))


def target_of(data: Data) -> Data:
    """Return what the loss compares with (see `Batch.target`)."""
    return _read(data, _field(data, "target"))


def _field(data: Data, field: str) -> int | str:
    names, position = (_INPUT_NAMES, 0) if field == "input" else (_TARGET_NAMES, 1)
    if isinstance(data, list | tuple) and not hasattr(data, "_fields") and len(data) > position:
        return position
    for name in names:
        if (isinstance(data, Mapping) and name in data) or (not isinstance(data, Mapping) and hasattr(data, name)):
            return name
    msg = (
        f"No {field} in a batch of type {type(data).__name__}. Use a tuple (input, target), or a field "
        f"named one of {names}."
    )
    raise BatchError(msg)


def _read(data: Data, key: int | str) -> Data:
    return data[key] if isinstance(key, int) or isinstance(data, Mapping) else getattr(data, key)


def _replace_field(data: Data, field: str, value: Data) -> Data:
    key = _field(data, field)
    if isinstance(key, int):
        items = list(data)
        items[key] = value
        return type(data)(items)
    if isinstance(data, Mapping):
        return with_items(data, {key: value})
    return data._replace(**{key: value}) if hasattr(data, "_replace") else with_fields(data, {key: value})
