"""Packs whose tokens have classes of their own, as a source: what a policy says of a class holds token by token.

    dataset = StreamingDataset("packs/", transform=read_packs)
    source = PackedSource(StreamingSource(dataset, rows_per_step=16))

A microbatch is a mapping with `input`, `target` and `documents` [rows, tokens]. The target is the next token of the
same document, and ignored at each border; the model has to keep documents apart (`GPT` does, by `documents`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.labels import IGNORED
from cosmati.core.lineage import TOMBSTONE, Lineage
from cosmati.core.source import Order, ReadsAhead, Source
from cosmati.data.graded import BandAndGrades, SourceKind, kind_of
from cosmati.data.packing import Pack
from cosmati.data.rows import RowBatch
from cosmati.errors import DataError
from cosmati.records.joint_classes import joint_name

_CLASSES, _ROWS = "token_class_ids", "token_row_ids"
_COLUMNS = ("input", "target", "documents", _CLASSES, _ROWS)


def read_packs(rows: RowBatch) -> dict[str, Tensor]:
    """Return the tensors of packs, from the columns that `pack_rows` has written; a `transform` of `StreamingDataset`.

    Raises:
        DataError: they aren't packs of one length.
    """
    return pack_tensors([Pack.of_row(row) for row in rows])


def pack_tensors(packs: Sequence[Pack]) -> dict[str, Tensor]:
    """Return what `PackedSource` reads of packs: int64 [packs, tokens] each.

    Args:
        packs: of one length.

    Returns:
        `input`; `target`, the next token of the same document, else ignored; `documents`, each piece's number in its
        pack, padding last; `token_class_ids` and `token_row_ids`, `TOMBSTONE` for padding.

    Raises:
        DataError: their lengths differ, or there is none.
    """
    lengths = sorted({len(pack.tokens) for pack in packs})
    if len(lengths) != 1:
        raise DataError(f"Packs of lengths {lengths} can't be one tensor. Pack them with one Packing(length=...).")
    made = [_columns(pack) for pack in packs]
    return {name: torch.from_numpy(np.stack([one[index] for one in made])) for index, name in enumerate(_COLUMNS)}


def _columns(pack: Pack) -> tuple[NDArray[np.int64], ...]:
    tokens = pack.tokens.astype(np.int64)
    sizes = pack.spans[:, 3] - pack.spans[:, 2]
    padding = len(tokens) - int(pack.spans[-1, 3])
    documents, rows, classes = (
        np.repeat(np.append(ids, last), np.append(sizes, padding))
        for ids, last in (
            (np.arange(len(sizes)), len(sizes)),
            (pack.spans[:, 0], TOMBSTONE),
            (pack.spans[:, 1], TOMBSTONE),
        )
    )
    is_within = (documents[1:] == documents[:-1]) & (rows[1:] != TOMBSTONE)
    target = np.append(np.where(is_within, tokens[1:], IGNORED), IGNORED)
    return tokens, target, documents, classes, rows


@dataclass(frozen=True, eq=False)
class PackedSource:
    """Packs of several classes in steps (see `cosmati.core.source.Source`).

    Args:
        source: of packs: its rows are what `pack_tensors` gives (a `StreamingSource` over
            `StreamingDataset(..., transform=read_packs)`, or an `InMemory` of it). The class of its rows isn't read,
            and their tokens' classes are declared by who packed them, even where the packs are signed.
        class_names: names that the class ids in the packs' spans index: `pack_rows(..., class_names=...)`. Of rows that
            belong to several classes they become the name that joins them. They may be left out where the packs' shards
            say them, as `write_dataset` notes them of `pack_rows`.
        row_kinds: what was measured of the rows of each: `pack_rows(..., kinds=...)`. Then a class stands there once
            for each kind of its rows.

    Raises:
        DataError: names repeat, there are other numbers of names and kinds, nobody says them, or the shards say others.
    """

    source: Source
    class_names: tuple[str, ...] = ()
    row_kinds: tuple[SourceKind, ...] = ()

    def __post_init__(self) -> None:
        told = _said_of(self.dataset)
        if told and not self.class_names:
            kinds = tuple(kind for _, kind in told)
            object.__setattr__(self, "class_names", tuple(name for name, _ in told))
            object.__setattr__(self, "row_kinds", kinds if any(map(str, kinds)) else ())
        given = self.row_kinds or (SourceKind(),) * len(self.class_names)
        if len(given) != len(self.class_names):
            raise DataError(f"{len(given)} row_kinds go with {len(self.class_names)} class_names: give one for each.")
        named = [_meaning(*one) for one in zip(self.class_names, given, strict=True)]
        object.__setattr__(self, "class_names", tuple(name for name, _ in named))
        if not named or len({*named}) < len(named):
            raise DataError(f"class_names={self.class_names} must be distinct, one at least: ids are places in it.")
        if told and named != [_meaning(*one) for one in told]:
            said = "; ".join(", ".join(filter(None, (name, str(kind)))) for name, kind in told)
            msg = f"The packs' shards say that their class ids mean {said}, and others were given. Leave them out."
            raise DataError(msg)

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Class id, and the number of what was measured of its rows (see `measured`)."""
        return tuple((index, index if self.row_kinds else 0) for index in range(len(self.class_names)))

    @property
    def measured(self) -> dict[int, tuple[int, dict[str, str]]]:
        """Band and grades of the rows of each class id; nothing where nobody says."""
        return {index: (kind.band, dict(kind.grades)) for index, kind in enumerate(self.row_kinds)}

    @property
    def dataset(self) -> object:
        """The data set from which the source reads; None where it has none."""
        return getattr(self.source, "dataset", None)

    @property
    def digest(self) -> str:
        """Hex digest of the packs and the spans in them, and of what is said to have been measured."""
        if not self.row_kinds:
            return self.source.digest
        return hashlib.sha256(f"{self.source.digest}\0{json.dumps(self.row_kinds)}".encode()).hexdigest()

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> PackedOrder:
        """Fix the order for a run: the source's, of all packs; a token whose class isn't offered is left out by itself.

        Raises:
            DataError: the packs can't be put in order, or the source's rows aren't packs.
        """
        del route_pure, classes
        order = self.source.order(seed=seed, num_microbatches=num_microbatches, route_pure=False)
        return PackedOrder(order, self.class_names)


def _meaning(class_name: str, kind: SourceKind) -> tuple[str, BandAndGrades]:
    """Return what a class id means: a class, joint where rows belong to several, and what was measured of them."""
    return joint_name((class_name, *kind.also)), kind_of(kind)


def _said_of(dataset: object) -> tuple[tuple[str, SourceKind], ...]:
    """Return what the shards of packs say of the class ids in their spans; empty where they don't.

    Raises:
        DataError: they say different things.
    """
    sources: Sequence[object] = getattr(dataset, "sources", ())
    told = {getattr(source, "packed", ()) for source in sources}
    if len(told) > 1:
        msg = "The class ids in the packs of these sources mean different classes or kinds. Pack all rows in one write."
        raise DataError(msg)
    return told.pop() if told else ()


class PackedOrder:
    """The order of a `PackedSource` (see `cosmati.core.source.Order`)."""

    def __init__(self, order: Order, class_names: tuple[str, ...]) -> None:
        self._order = order
        self._class_names = class_names
        self.steps_per_epoch = order.steps_per_epoch
        self.rows_per_step = order.rows_per_step

    def class_id(self, step: int, index: int) -> None:
        """Return None: a pack's tokens have classes of their own."""
        return

    def expect(self, step: int, indices: Sequence[int]) -> None:
        """Let the source read ahead, where it can."""
        if isinstance(self._order, ReadsAhead):
            self._order.expect(step, indices)

    def microbatch(self, step: int, index: int) -> Batch:
        """Return a microbatch whose lineage tells each token's class and row.

        Raises:
            DataError: the rows aren't packs, or a token's class has no name.
        """
        batch = self._order.microbatch(step, index)
        data: Any = batch.data
        missing = [name for name in _COLUMNS if not isinstance(data, Mapping) or name not in data]
        if missing:
            msg = (
                f"The source's rows aren't packs: they have no {', '.join(missing)}. Open them with "
                "StreamingDataset(..., transform=read_packs), or give InMemory(pack_tensors(packs), ...)."
            )
            raise DataError(msg)
        present = batch.present
        classes, rows, target = (_only(data[name], present, none) for name, none in _EMPTY)
        if classes.numel() and not -1 <= int(classes.min()) <= int(classes.max()) < len(self._class_names):
            msg = (
                f"Tokens have class ids from {int(classes.min())} to {int(classes.max())}, and there are "
                f"{len(self._class_names)} class_names. Give the names with which the packs were made."
            )
            raise DataError(msg)
        own = batch.lineage
        lineage = Lineage(own.row_ids, _class_of_rows(classes), own.parents, own.digests, classes, rows)
        told = {"input": data["input"], "target": target, "documents": data["documents"]}
        return Batch(told, lineage.by_names(self._class_names), None, batch.band)


_EMPTY = ((_CLASSES, TOMBSTONE), (_ROWS, TOMBSTONE), ("target", IGNORED))
"""What a pack that isn't there has."""


def _only(column: Tensor, present: Tensor | None, none: int) -> Tensor:
    return column if present is None else column.masked_fill(~present[:, None], none)


def _class_of_rows(classes: Tensor) -> Tensor:
    """Return the class of each pack that has one, int64 [packs]; `TOMBSTONE` where its tokens have several."""
    highest = classes.amax(1)
    is_pure = ((classes == highest[:, None]) | (classes == TOMBSTONE)).all(1)
    return torch.where(is_pure, highest, TOMBSTONE)
