"""Where the rows of a batch come from, and the tokens of rows that were packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.errors import BatchError
from cosmati.records.joint_classes import joint_name

TOMBSTONE = -1
"""Row id of a row that isn't there: canonical shape, content zero, weight zero."""


@lru_cache(maxsize=64)
def _zeros(num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which rows a batch holds, always on CPU.

    Attributes:
        row_ids: int64 [rows], `TOMBSTONE` where there is none.
        class_ids: int64 [rows], index into the taxonomy's classes.
        parents: int64 [rows, num_parents], all rows that a mixed row was made of; None where each is its own.
        digests: uint8 [rows, 32], SHA-256 of the row's content, where the source knows it.
        token_class_ids: int64 [rows, tokens], the class of each token of the input where rows are packs of others;
            `TOMBSTONE` where it's padding. None where a row is of one class.
        token_row_ids: int64 [rows, tokens], the id of the row from which each token was packed; likewise.
        parent_class_ids: int64 [rows, num_parents], the class of each parent.
        bands: int64 [rows], the band of each row within its class, where `Batch.band` doesn't say it of all.
        is_known: whether it says where the rows come from; it doesn't for rows that were only numbered.
        class_names: names that the class ids index, where their source says them (`by_names`); None: the taxonomy's.
            Where class ids are replaced and the names aren't (`dataclasses.replace`), nobody knows: that's refused.
    """

    row_ids: Tensor
    class_ids: Tensor
    parents: Tensor | None = None
    digests: Tensor | None = None
    token_class_ids: Tensor | None = None
    token_row_ids: Tensor | None = None
    parent_class_ids: Tensor | None = None
    bands: Tensor | None = None
    is_known: bool = True
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.class_names is not None and not isinstance(self.class_names, _NamesOf):
            _named(self, self.class_names)

    def __reduce__(self) -> tuple[Any, ...]:
        # As arrays: a tensor that goes from one process to another takes a file descriptor, and 0.1 ms.
        own = (None if tensor is None else tensor.numpy() for tensor in self._tensors)
        names = None if self.class_names is None else tuple(self.class_names)
        return _lineage_of_arrays, (names, _is_of_others(self), self.is_known, *own)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order in which they're given."""
        own = (self.row_ids, self.class_ids, self.parents, self.digests)
        return (*own, *self.by_token, self.parent_class_ids, self.bands)

    @property
    def by_token(self) -> tuple[Tensor | None, Tensor | None]:
        """Classes and rows of the tokens of packs."""
        return self.token_class_ids, self.token_row_ids

    @property
    def num_rows(self) -> int:
        """Rows, tombstones included."""
        return int(self.row_ids.shape[0])

    @classmethod
    def of_rows(cls, first: int, num_rows: int) -> Lineage:
        """Number rows of unknown origin."""
        return _Numbered(first, num_rows)

    def by_names(self, class_names: tuple[str, ...] | None) -> Lineage:
        """Return the same lineage, whose class ids index these names."""
        return _named(dataclasses.replace(self), class_names)

    @property
    def class_id_tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All class ids that there are: of rows, parents and tokens."""
        return self.class_ids, self.parent_class_ids, self.token_class_ids

    def numbered_by(self, class_names: Sequence[str]) -> Lineage:
        """Return the lineage with class ids that index another list of names; unchanged where it has no names.

        Raises:
            BatchError: a class of its rows or tokens isn't among them, an id has no name, or ids were replaced alone.
        """
        own = self.class_names
        if own is None:
            return self
        if _is_of_others(self):
            msg = (
                "The class ids of a batch were replaced, and its class names weren't: of which list are they? Say it by"
            )
            raise BatchError(f"{msg} Lineage.by_names(class_names), with None if they're places in the taxonomy.")
        if own == tuple(class_names):
            return self
        of = ("class_ids", "parent_class_ids", "token_class_ids")
        told = {name: ids for name in of if (ids := getattr(self, name)) is not None}
        changed: dict[str, Any] = {name: renumbered(ids, own, class_names) for name, ids in told.items()}
        return _named(dataclasses.replace(self, **changed), tuple(class_names))

    def select(self, indices: Tensor | slice) -> Lineage:
        """Keep some rows, in the order given."""
        if isinstance(indices, Tensor):
            indices = indices.cpu()
        kept: list[Any] = [*(None if ids is None else ids[indices] for ids in self._tensors), self.is_known]
        return _following(Lineage(*kept), self)

    def cut(self, change: Callable[[Tensor], Tensor], pieces: int = 1) -> Lineage:
        """Follow rows that are cut off, or into pieces which follow one another and keep their row's id.

        Args:
            change: what is done to each tensor [rows, tokens] of the batch.
            pieces: that each row is cut into.

        Raises:
            BatchError: the tokens of packs aren't those of so many rows any more.
        """
        cut = self if pieces == 1 else self.select(torch.arange(len(self.row_ids)).repeat_interleave(pieces))
        if self.token_class_ids is not None:
            classes, rows = (None if ids is None else change(ids) for ids in self.by_token)
            cut = _following(dataclasses.replace(cut, token_class_ids=classes, token_row_ids=rows), self)
            check_lineage(cut)
        return cut

    def mix(self, indices: Tensor) -> Lineage:
        """Mix each row with row `indices[i]`; ids and classes stay the first parent's.

        Raises:
            BatchError: the rows are packs, whose tokens would be of two classes.
        """
        if self.token_class_ids is not None:
            msg = "Packs aren't mixed: a token would be of two rows. Leave the method out, or pack after mixing."
            raise BatchError(msg)
        indices = indices.cpu()
        rows = self.row_ids[:, None] if self.parents is None else self.parents
        # Of parents without classes nothing is known, and nothing is made up.
        classes = self.parent_class_ids if self.parents is not None else self.class_ids[:, None]
        parents, of_parents = (
            None if own is None else torch.cat([own, own[indices]], dim=1) for own in (rows, classes)
        )
        own = (self.row_ids, self.class_ids, parents, self.digests)
        mixed = Lineage(*own, parent_class_ids=of_parents, bands=self.bands, is_known=self.is_known)
        return _following(mixed, self)

    def without(self, gone: Tensor) -> Lineage:
        """Return the lineage with tombstones in place of some rows; they keep their class.

        Args:
            gone: bool [rows].
        """

        def buried(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.masked_fill(gone if ids.ndim == 1 else gone[:, None], TOMBSTONE)

        classes, rows = map(buried, self.by_token)
        rest = Lineage(
            self.row_ids.masked_fill(gone, TOMBSTONE),
            self.class_ids,
            buried(self.parents),
            None if self.digests is None else self.digests.masked_fill(gone[:, None], 0),
            classes,
            rows,
            self.parent_class_ids,
            self.bands,
            self.is_known,
        )
        return _following(rest, self)


class _NamesOf(tuple[str, ...]):  # noqa: SLOT001  (a tuple's subclass can have none but empty ones)
    """Names of classes, and the ids that index them: others, or others in them, would mean other classes."""

    ids: tuple[Tensor | None, ...]
    versions: tuple[int, ...]


def _named(fresh: Lineage, class_names: tuple[str, ...] | None) -> Lineage:
    names = None if class_names is None else _NamesOf(class_names)
    if names is not None:
        names.ids = fresh.class_id_tensors
        names.versions = _versions_of(names.ids)
    object.__setattr__(fresh, "class_names", names)
    return fresh


def _following(fresh: Lineage, whole: Lineage) -> Lineage:
    """Give a lineage the names of the one that it was made of, and whether they're of its ids."""
    if not _is_of_others(whole):
        return _named(fresh, whole.class_names)
    object.__setattr__(fresh, "class_names", whole.class_names)
    return fresh


def _is_of_others(lineage: Lineage) -> bool:
    names = lineage.class_names
    if not isinstance(names, _NamesOf):
        return False
    found = zip(names.ids, lineage.class_id_tensors, strict=True)
    return any(new is not None and old is not new for old, new in found) or names.versions != _versions_of(names.ids)


def _versions_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return how often each tensor was written to in place; those of inference mode aren't counted."""
    return tuple(-1 if one is None or one.is_inference() else one._version for one in tensors)  # noqa: SLF001


def renumbered(ids: Tensor, names: Sequence[str], class_names: Sequence[str]) -> Tensor:
    """Return class ids that index one list of names as those that index another; tombstones stay.

    Args:
        ids: of classes, of any shape.
        names: that they index.
        class_names: that they shall index. The members of a class of several may stand in another order.

    Raises:
        BatchError: a class isn't among them, or an id has no name.
    """
    found = [one for one in ids.unique().tolist() if one != TOMBSTONE]
    if any(not 0 <= one < len(names) for one in found):
        msg = f"A Lineage has class ids {found[0]} to {found[-1]}, and its source names {len(names)} classes."
        raise BatchError(f"{msg} Mend what changed the ids.")
    places = {joint_name([name]): index for index, name in enumerate(class_names)}
    table = [places.get(joint_name([name]), TOMBSTONE) for name in names]
    if unknown := [names[one] for one in found if table[one] == TOMBSTONE]:
        msg = f"Rows are of {', '.join(unknown)}, and the run's classes are {', '.join(class_names)}. Give a taxonomy"
        raise BatchError(f"{msg} that has them; if rows are of several classes, give the data to the Trainer.")
    return torch.tensor([*table, TOMBSTONE])[ids.long()]  # a tombstone's -1 is the last


def _lineage_of_arrays(
    class_names: tuple[str, ...] | None, is_of_others: bool, is_known: bool, *arrays: NDArray[Any] | None
) -> Lineage:
    fields: list[Any] = [*(None if array is None else torch.from_numpy(array) for array in arrays), is_known]
    found = _named(Lineage(*fields), class_names)
    if is_of_others and isinstance(found.class_names, _NamesOf):
        found.class_names.ids = (None, None, None)
    return found


class _Numbered(Lineage):
    """Rows of unknown origin, whose tensors are made when somebody looks: most steps nobody does (6 us)."""

    __slots__ = ("_first", "_num_rows")
    _first: int
    _num_rows: int

    def __init__(self, first: int, num_rows: int) -> None:
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_num_rows", num_rows)

    def __reduce__(self) -> tuple[type[_Numbered], tuple[int, int]]:
        return _Numbered, (self._first, self._num_rows)

    def select(self, indices: Tensor | slice) -> Lineage:
        """Keep some rows; a run of them stays numbered, and of unknown origin."""
        if isinstance(indices, slice) and indices.step in (None, 1):
            start, stop, _ = indices.indices(self._num_rows)
            return _Numbered(self._first + start, max(0, stop - start))
        return Lineage.select(self, indices)

    @property
    def num_rows(self) -> int:
        """As many as were numbered."""
        return self._num_rows

    @property
    def is_known(self) -> bool:
        """False: rows in the order in which they came."""
        return False

    @property
    def row_ids(self) -> Tensor:
        """int64 [rows]."""
        return torch.arange(self._first, self._first + self._num_rows)

    @property
    def class_ids(self) -> Tensor:
        """int64 [rows], zeros."""
        return _zeros(self._num_rows)

    @property
    def parents(self) -> None:
        """None: each row is its own."""

    @property
    def digests(self) -> None:
        """None: the content isn't known."""

    @property
    def token_class_ids(self) -> None:
        """None: a row is of one class."""

    @property
    def token_row_ids(self) -> None:
        """None: each row is its own."""

    @property
    def parent_class_ids(self) -> None:
        """None: each row is its own."""

    @property
    def bands(self) -> None:
        """None: nobody says."""

    @property
    def class_names(self) -> None:
        """None: nobody says."""


_NUM_BANDS = 1 << 16
"""That a ledger's cells can tell."""


def _are_whole(ids: Tensor) -> bool:
    return not (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())


def check_lineage(lineage: Lineage) -> None:
    """Compare what a user has put together.

    Raises:
        BatchError: ids aren't whole numbers, or speak of different rows.
    """
    fields = {"row_ids": lineage.row_ids, "class_ids": lineage.class_ids}
    fields |= {} if lineage.bands is None else {"bands": lineage.bands}
    for name, ids in fields.items():
        if not _are_whole(ids) or ids.ndim != 1:
            msg = (
                f"Lineage.{name} is {ids.dtype} {tuple(ids.shape)}, and ids are whole numbers, one a row: int64 "
                "[rows]. Cut-off numbers would be other classes."
            )
            raise BatchError(msg)
    lengths = {name: len(ids) for name, ids in fields.items()}
    others = ("parents", "digests", "token_class_ids", "token_row_ids", "parent_class_ids")
    lengths |= {n: len(ids) for n in others if (ids := getattr(lineage, n)) is not None}
    if len({*lengths.values()}) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BatchError(f"A Lineage speaks of different numbers of rows: {found}. Give one of each for each row.")
    bands = lineage.bands
    if bands is not None and bool(((bands < 0) | (bands >= _NUM_BANDS)).any()):
        msg = f"Lineage.bands has {int(bands.min())} to {int(bands.max())}, and bands go from 0 to {_NUM_BANDS - 1}."
        raise BatchError(f"{msg} Give rows of which nobody has measured anything a band of their own, or no bands.")
    parents, of_parents = lineage.parents, lineage.parent_class_ids
    if of_parents is not None and (parents is None or parents.shape != of_parents.shape):
        shapes = f"parents {None if parents is None else tuple(parents.shape)} and classes {tuple(of_parents.shape)}"
        raise BatchError(f"A Lineage speaks of different parents: {shapes}. Give one class for each parent.")
    for name, own in (("parents", parents), ("parent_class_ids", of_parents)):
        if own is not None and (own.ndim != 2 or not _are_whole(own)):
            what = f"{own.dtype} {tuple(own.shape)}"
            raise BatchError(f"Lineage.{name} is {what}, and isn't int64 [rows, num_parents]. Give one id a parent.")
    classes, rows = lineage.by_token
    if classes is not None and rows is not None and classes.shape != rows.shape:
        shapes = f"token_class_ids {tuple(classes.shape)} and token_row_ids {tuple(rows.shape)}"
        raise BatchError(f"A Lineage speaks of different tokens: {shapes}. Give one of each for each token.")
    if classes is not None and (classes.ndim != 2 or not _are_whole(classes)):
        what = f"{classes.dtype} {tuple(classes.shape)}"
        raise BatchError(f"Lineage.token_class_ids is {what}, and isn't int64 [rows, tokens]. Give one class a token.")
