"""A source in which some rows aren't there any more: the plan stays, and a tombstone stands in each one's place.

The run that never saw them is the same run over such a source: every position, microbatch and draw of the other rows is
what it was. Content is replaced before anything reads it, not only weighed by 0, since 0 x inf is NaN.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch, bury
from cosmati.core.labels import IGNORED
from cosmati.core.source import ImageSize, Order, ReadsAhead, ResizesImages, Source, TellsBands
from cosmati.data.graded import SourceKind
from cosmati.errors import DataError


@dataclass(frozen=True, eq=False)
class Tombstoned:
    """Rows with provenance, some of which are tombstones (see `cosmati.core.source.Source`).

    Args:
        source: that has the rows; of packs, a `PackedSource`.
        classes: names of the classes whose rows are gone.
        rows: ids of rows that are gone; of packs, of the documents.
        key: keeps who reads the digest from finding the rows by trying ids out; 32 bytes, or none.
        named: the digest itself, in hex as ASCII, as somebody says it who has the key; for who hasn't.

    Raises:
        DataError: the source has no such class.
    """

    source: Source
    classes: Collection[str] = ()
    rows: Collection[int] = ()
    key: bytes = field(default=b"", repr=False)
    named: bytes = b""  # no text: texts are what a run is made of

    def __post_init__(self) -> None:
        if isinstance(self.classes, str) or (unknown := sorted(set(self.classes) - set(self.source.class_names))):
            unknown = [self.classes] if isinstance(self.classes, str) else unknown
            msg = (
                f"The source has no class {', '.join(unknown)} whose rows could be gone. Give a list of its names: "
                f"{list(self.source.class_names)}."
            )
            raise DataError(msg)
        # As a set they're in no record: what a run is made of names tuples of numbers in clear.
        object.__setattr__(self, "rows", frozenset(map(int, self.rows)))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that lineage's class ids index."""
        return self.source.class_names

    @property
    def dataset(self) -> object:
        """The data set from which the source reads; None where it has none."""
        return getattr(self.source, "dataset", None)

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Class id and kind of the rows that the source has: tombstones keep theirs."""
        own = getattr(self.source, "kinds", None)
        return tuple((index, 0) for index in range(len(self.class_names))) if own is None else tuple(own)

    @property
    def measured(self) -> Mapping[int, tuple[int, Mapping[str, str]]]:
        """Band and grades that each number of a kind stands for; empty where numbers are bands."""
        return getattr(self.source, "measured", {})

    @property
    def row_kinds(self) -> tuple[SourceKind, ...]:
        """What was measured of the rows of each class of packs; empty where nobody says, or rows aren't packs."""
        return getattr(self.source, "row_kinds", ())

    @property
    def digest(self) -> str:
        """Hex digest of the source's own, and of what is gone."""
        if self.named:
            return self.named.decode()
        told = f"{self.source.digest}\0{sorted(self.classes)}\0{sorted(self.rows)}"
        if self.key:
            return hmac.digest(self.key, b"cosmati tombstones\0" + told.encode(), "sha256").hex()
        return hashlib.sha256(told.encode()).hexdigest()

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> TombstonedOrder:
        """Fix the order for a run: the source's.

        Raises:
            DataError: the source can't be put in order.
        """
        order = self.source.order(seed=seed, num_microbatches=num_microbatches, route_pure=route_pure, classes=classes)
        gone = [index for index, name in enumerate(self.source.class_names) if name in self.classes]
        return TombstonedOrder(order, gone, list(self.rows))


def beneath(source: object) -> tuple[object, frozenset[str]]:
    """Return a source without its tombstones, and the names of the classes whose rows are gone; they may be nested."""
    gone = frozenset[str]()
    while isinstance(source, Tombstoned):
        gone |= {*source.classes}
        source = source.source
    return source, gone


class TombstonedOrder:
    """The order of a `Tombstoned` source (see `cosmati.core.source.Order`)."""

    def __init__(self, order: Order, class_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._order = order
        self._class_ids = torch.tensor(class_ids, dtype=torch.int64)
        self._rows = torch.tensor(rows, dtype=torch.int64)
        self.steps_per_epoch = order.steps_per_epoch
        self.rows_per_step = order.rows_per_step

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch: as it was."""
        return self._order.class_id(step, index)

    def band(self, step: int, index: int) -> int:
        """Return the band of a microbatch: as it was."""
        return self._order.band(step, index) if isinstance(self._order, TellsBands) else 0

    def expect(self, step: int, indices: Sequence[int]) -> None:
        """Let the source read ahead, where it can."""
        if isinstance(self._order, ReadsAhead):
            self._order.expect(step, indices)

    @property
    def image_size(self) -> ImageSize | None:
        """Size of all images, where the source can give another one."""
        return self._order.image_size if isinstance(self._order, ResizesImages) else None

    def resize(self, size_at: Callable[[int], ImageSize]) -> None:
        """Have images in the size of their step."""
        if isinstance(self._order, ResizesImages):
            self._order.resize(size_at)

    def microbatch(self, step: int, index: int) -> Batch:
        """Return a microbatch with tombstones in place of the rows, or of the documents of packs, that are gone."""
        batch = self._order.microbatch(step, index)
        lineage = batch.lineage
        if lineage.token_class_ids is not None:
            return self._without_tokens(batch, self._gone(lineage.token_class_ids, lineage.token_row_ids))
        gone = self._gone(lineage.class_ids, lineage.row_ids)
        return bury(batch, gone) if bool(gone.any()) else batch

    def _gone(self, class_ids: Tensor, row_ids: Tensor | None) -> Tensor:
        gone = torch.isin(class_ids, self._class_ids)
        return gone if row_ids is None else gone | torch.isin(row_ids, self._rows)

    @staticmethod
    def _without_tokens(batch: Batch, gone: Tensor) -> Batch:
        """Take documents out of packs: their tokens are 0, and nothing predicts them.

        Their places stay theirs: a pack whose tokens are of other classes than before would go another road, with
        other rounding.
        """
        rows = batch.lineage.token_row_ids
        lineage = replace(batch.lineage, token_row_ids=None if rows is None else rows.masked_fill(gone, TOMBSTONE))
        target = batch.target.masked_fill(gone, IGNORED)
        return batch.replace(input=batch.input.masked_fill(gone, 0), target=target, lineage=lineage)
