"""Rows held in memory, visited in one keyed order.

The order is a pure function of `(seed, epoch)`. Where microbatches are route-pure, each class is permuted and cut by
itself, and the classes' microbatches are interleaved so that any stretch of an epoch holds them in their proportion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch, Data, Lineage, bury, count_rows, iterate_tensors
from cosmati.core.later import later
from cosmati.core.nest import leaves
from cosmati.core.plain import encode
from cosmati.core.rng import keyed_permutation, position_key
from cosmati.data.order.plan import rows_each
from cosmati.errors import CheckpointError, DataError

InMemoryTail = Literal["drop", "pad"]
PureRuns = list[tuple[int | None, NDArray[np.int64]]]
"""Microbatches of an epoch: class (None where mixed) and indices of rows, `TOMBSTONE` where padded."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """A source of rows in memory.

    Args:
        data: nest of tensors, each [rows, ...]; NumPy arrays and lists with a string or number a row go with them.
        rows_per_step: rows in a step, over all its microbatches.
        class_ids: int64 [rows]; all of class 0 if None.
        class_names: names that class ids index.
        row_ids: int64 [rows], distinct; 0 to rows - 1 if None.
        row_digests: uint8 [rows, 32], SHA-256 of each row's content.
        tail: `drop` leaves out what doesn't fill a microbatch or a step at an epoch's end; `pad` fills it with
            tombstone rows, and every row is visited exactly once an epoch.
        sort_by_class: under a policy, sort each step's microbatches by class, so that ranks run alike ones at a time.
            It's another order, and so another run.

    Raises:
        DataError: lengths differ, ids repeat, or a class id has no name.
    """

    data: Data
    rows_per_step: int
    class_ids: Tensor | None = None
    class_names: tuple[str, ...] = ("all",)
    row_ids: Tensor | None = None
    row_digests: Tensor | None = None
    tail: InMemoryTail = "drop"
    sort_by_class: bool = later(default=False)
    lineage: Lineage = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_rows = count_rows(self.data)
        class_ids = torch.zeros(num_rows, dtype=torch.int64) if self.class_ids is None else self.class_ids
        row_ids = torch.arange(num_rows) if self.row_ids is None else self.row_ids
        for name, tensor in (("class_ids", class_ids), ("row_ids", row_ids)):
            if tensor.shape != (num_rows,):
                msg = f"{name} has shape {tuple(tensor.shape)}, and the data has {num_rows} rows. Give one id a row."
                raise DataError(msg)
        if len(row_ids.unique()) != num_rows or bool((row_ids < 0).any()):
            msg = "Row ids must be distinct and not negative: they key the rows' randomness and the ledger."
            raise DataError(msg)
        if num_rows and not 0 <= int(class_ids.min()) <= int(class_ids.max()) < len(self.class_names):
            msg = f"Class ids run to {int(class_ids.max())}, and there are {len(self.class_names)} class names."
            raise DataError(msg)
        lineage = Lineage(row_ids, class_ids, digests=self.row_digests).by_names(self.class_names)
        object.__setattr__(self, "lineage", lineage)

    @property
    def num_rows(self) -> int:
        """Rows, without padding."""
        return int(self.lineage.row_ids.shape[0])

    @property
    def digest(self) -> str:
        """SHA-256 of content, ids and classes, in hex."""
        return _digest(self)

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> InMemoryOrder:
        """Fix the order of the rows.

        Raises:
            DataError: V doesn't divide the rows of a step, or no step can be filled.
        """
        order = InMemoryOrder(self, seed, num_microbatches, route_pure, classes)
        if order.steps_per_epoch == 0:
            msg = (
                f"{self.num_rows} rows don't fill one step of {self.rows_per_step} with tail='drop'. "
                "Use fewer rows a step, or tail='pad'."
            )
            raise DataError(msg)
        return order


@lru_cache(maxsize=64)
def _digest(source: InMemory) -> str:
    digest = hashlib.sha256()
    tensors = [*iterate_tensors(source.data), source.lineage.row_ids, source.lineage.class_ids]
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update("\0".join(source.class_names).encode())
    others = [leaf for leaf in leaves(source.data) if not isinstance(leaf, Tensor)]
    if others:
        _update(digest, others)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, others: Data) -> None:
    """Add what isn't a tensor: strings, numbers and arrays.

    Raises:
        DataError: something whose content can't be told.
    """
    try:
        facts, arrays = encode(others)
    except CheckpointError as error:
        msg = f"The source's rows have no digest. {error}"
        raise DataError(msg) from error
    digest.update(json.dumps(facts).encode())
    for array in arrays.values():
        digest.update(array.numpy().tobytes())


class InMemoryOrder:
    """The order of an `InMemory` source under a seed (see `cosmati.core.source.Order`)."""

    def __init__(
        self,
        source: InMemory,
        seed: int,
        num_microbatches: int,
        route_pure: bool,
        classes: Collection[int] | None,
    ) -> None:
        self._source = source
        self._seed = seed
        self._num_microbatches = num_microbatches
        self._rows = rows_each(source.rows_per_step, num_microbatches)
        class_ids = source.lineage.class_ids.numpy()
        offered = np.ones(len(class_ids), bool) if classes is None else np.isin(class_ids, list(classes))
        self._groups: list[tuple[int | None, NDArray[np.int64]]] = [(None, np.flatnonzero(offered))]
        if route_pure:
            present = np.unique(class_ids[offered])
            self._groups = [(int(c), np.flatnonzero(offered & (class_ids == c))) for c in present]
        pieces = sum(self._num_pieces(len(rows)) for _, rows in self._groups)
        whole, rest = divmod(pieces, num_microbatches)
        self.steps_per_epoch: int = whole + (1 if rest and source.tail == "pad" else 0)
        self.rows_per_step: int = source.rows_per_step
        self._epoch: tuple[int, PureRuns] = (-1, [])

    def _num_pieces(self, num_rows: int) -> int:
        return -(-num_rows // self._rows) if self._source.tail == "pad" else num_rows // self._rows

    def _pieces(self, epoch: int) -> PureRuns:
        """Return the microbatches of an epoch. Only the last epoch asked for is kept."""
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        return self._epoch[1]

    def _plan(self, epoch: int) -> PureRuns:
        row_ids = self._source.lineage.row_ids.numpy()
        key = position_key(self._seed, "order", epoch)
        placed: list[tuple[float, int, int | None, NDArray[np.int64]]] = []
        for group, (class_id, rows) in enumerate(self._groups):
            shuffled = rows[keyed_permutation(key, row_ids[rows])]
            num_pieces = self._num_pieces(len(rows))
            padding = max(0, num_pieces * self._rows - len(rows))
            shuffled = np.concatenate([shuffled, np.full(padding, TOMBSTONE)])
            for index in range(num_pieces):
                piece = shuffled[index * self._rows : (index + 1) * self._rows]
                placed.append(((index + 0.5) / num_pieces, group, class_id, piece))
        placed.sort(key=lambda item: item[:2])
        pieces: PureRuns = [(class_id, piece) for _, _, class_id, piece in placed]
        missing = self.steps_per_epoch * self._num_microbatches - len(pieces)
        empty = np.full(self._rows, TOMBSTONE)
        # A microbatch of tombstones takes the class of the last real one: it needs some route, and weighs nothing.
        pieces += [(pieces[-1][0], empty)] * missing
        if not self._source.sort_by_class:
            return pieces
        steps = (pieces[at : at + self._num_microbatches] for at in range(0, len(pieces), self._num_microbatches))
        return [
            piece for step in steps for piece in sorted(step, key=lambda piece: -1 if piece[0] is None else piece[0])
        ]

    def _piece(self, step: int, index: int) -> tuple[int | None, NDArray[np.int64]]:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return self._pieces(epoch)[step_in_epoch * self._num_microbatches + index]

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch."""
        return self._piece(step, index)[0]

    def microbatch(self, step: int, index: int) -> Batch:
        """Return a microbatch: rows / V rows, tombstones where the epoch's tail is padded."""
        class_id, piece = self._piece(step, index)
        rows = torch.from_numpy(piece)
        batch = Batch(self._source.data, self._source.lineage, class_id).select(rows.clamp(min=0))
        gone = rows == TOMBSTONE
        return bury(batch, gone) if bool(gone.any()) else batch
