"""A step's rows, cut into microbatches: in order, or under a policy so that each holds rows of one class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from cosmati.core.batch import Batch, Data, Lineage, count_rows, count_rows_and_tokens
from cosmati.core.clock import Clock
from cosmati.core.containers import shallow_copy
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly


def refuse_untold(batch: Data | None, data: object) -> None:
    """Refuse a batch of a governed run that doesn't say of which classes its rows are.

    Raises:
        PlanError: it doesn't.
    """
    if not (isinstance(batch, Batch) and batch.lineage.is_known):
        msg = (
            f"A policy needs rows with classes, and {type(data).__name__} has none. Use a Source (InMemory(..., "
            "class_ids=..., class_names=...)), or have it give Batch(data, Lineage(row_ids, class_ids)), of a "
            "DataLoader by its collate_fn: class ids index the taxonomy's classes."
        )
        raise PlanError(msg)


def split_step(
    a: Assembly, clock: Clock, batch: Data, generators: Sequence[torch.Generator] = ()
) -> tuple[list[Batch], list[int | None]]:
    """Return this rank's microbatches of a step's rows, and the classes of all: under a policy, each is of one.

    Args:
        a: of the run.
        clock: of the step.
        batch: the rows, whole, the same on every rank.
        generators: from which later rows follow.

    Raises:
        BatchError, PlanError: the batch can't be read or cut.
        DataError: ranks were given different ones.
    """
    a.ranks.refuse_unlike(clock.step, batch, *(generator.get_state() for generator in generators))
    whole = as_batch(batch, clock.rows, pieces=a.num_microbatches)
    if a.policy is not None:
        whole = whole.numbered_by(a.router.class_names)
    parts = split_batch(whole, a.num_microbatches, by_class=a.policy is not None)
    class_ids = [a.router.class_of(part) for part in parts]
    a.deferred_rows.see(parts, class_ids, clock.step, a.router)
    return [parts[i] for i in a.layout.mine], class_ids


def as_batch(data: Data, first_row: int, *, trusted: bool = False, pieces: int = 1) -> Batch:
    """Wrap the user's data, numbering its rows from `first_row`; a `Batch` is taken as it is.

    Args:
        data: the user's nest of tensors.
        first_row: id of its first row.
        trusted: count the first tensor's rows, and don't compare all tensors' (10 us).
        pieces: into how many microbatches it's going to be cut.

    Raises:
        BatchError: its rows can't be counted, or can in two ways, or a `Batch`'s lineage is of others.
    """
    if isinstance(data, Batch):
        if not trusted:
            data.check()
        return data
    if trusted:
        return Batch(data, Lineage.of_rows(first_row, count_rows_and_tokens(data)[0]), None)
    return Batch(shallow_copy(data), Lineage.of_rows(first_row, count_rows(data, pieces)), None)


def split_batch(batch: Batch, num_microbatches: int, *, by_class: bool = False) -> list[Batch]:
    """Cut a step's batch into V microbatches of equal shape, in order.

    Args:
        batch: of a step.
        num_microbatches: V.
        by_class: each microbatch has to hold rows of one class and band: where it wouldn't, rows are regrouped
            (`regrouped`).

    Raises:
        PlanError: V doesn't divide the rows; or it's less than the number of classes; or mixed rows' bands aren't told.
    """
    if by_class and (kinds := _unlike_kinds(batch, num_microbatches)) is not None:
        return regrouped(batch, kinds, num_microbatches)
    if num_microbatches == 1:
        return [batch]
    rows, rest = divmod(batch.num_rows, num_microbatches)
    if rest or not rows:
        msg = (
            f"A batch of {batch.num_rows} rows can't be split into V = {num_microbatches} microbatches of one shape. "
            f"Give a multiple of {num_microbatches} rows (drop_last=True in a DataLoader), or set "
            "another num_microbatches."
        )
        raise PlanError(msg)
    return [batch.select(slice(i * rows, (i + 1) * rows)) for i in range(num_microbatches)]


def _unlike_kinds(batch: Batch, num_microbatches: int) -> Tensor | None:
    """Return class and band of each row, where microbatches cut in order would hold several, or unlike many rows.

    A tombstone keeps its class, so that a step is cut as if its row were there. One without a class follows the first.
    """
    lineage, present, announced = batch.lineage, batch.present, batch.class_id
    bands = lineage.bands
    is_told = lineage.is_known and lineage.token_class_ids is None and batch.num_rows > 0
    if not is_told or (announced is not None and bands is None):
        return None
    if bands is not None and lineage.parents is not None:
        msg = "Rows that were mixed don't tell the bands of all that they were made of. Mix them by a method instead."
        raise PlanError(msg)
    ids = lineage.class_ids if announced is None else torch.full_like(lineage.class_ids, announced)
    if present is not None and bool((ids >= 0).any()):
        ids = ids.masked_fill(~present & (ids < 0), int(ids[ids >= 0][0]))
    kinds = torch.stack([ids, torch.full_like(ids, batch.band) if bands is None else bands], dim=1)
    if bands is None and len(kinds) % num_microbatches == 0:
        return None if all(bool((part == part[0]).all()) for part in kinds.chunk(num_microbatches)) else kinds
    return kinds


def regrouped(batch: Batch, kinds: Tensor, num_microbatches: int) -> list[Batch]:
    """Cut a batch into V route-pure microbatches, of unlike sizes: kinds in order, each one's rows in theirs.

    Each kind gets one, and each further one goes to the kind whose are largest.

    Args:
        batch: of a step.
        kinds: class and band of each row, int64 [rows, 2].
        num_microbatches: V.

    Raises:
        PlanError: there are more kinds, or fewer rows, than microbatches.
    """
    found, kind_of, numbers = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    sizes = numbers.tolist()
    if not len(sizes) <= num_microbatches <= len(kinds):
        what = "classes" if len(found[:, 0].unique()) == len(found) else "classes and bands"
        msg = (
            f"A governed step's microbatches hold rows of one class each, and this step has {len(kinds)} rows of "
            f"{len(sizes)} {what} for V = {num_microbatches}. Set num_microbatches to a power of two between these "
            "numbers, or give a step fewer classes."
        )
        raise PlanError(msg)
    shares = [1] * len(sizes)
    while sum(shares) < num_microbatches:
        largest = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[largest] += 1
    return [
        dataclasses.replace(batch.select(part), class_id=class_id, band=band)
        for index, (class_id, band) in enumerate(found.tolist())
        for part in (kind_of == index).nonzero().squeeze(1).tensor_split(shares[index])
    ]
