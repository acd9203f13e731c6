"""Loaders and data sets that aren't ours: what they give, to whom, and in which order."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from cosmati.errors import DataError

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_SAMPLERS = (SequentialSampler, *_SHUFFLING)


def refuse_rows(data: object) -> None:
    """Refuse what gives rows, or names, where batches are meant.

    Raises:
        DataError: with the line to write.
    """
    kind = type(data).__name__
    if isinstance(data, Tensor | np.ndarray):
        mend = "InMemory(rows, rows_per_step=32), or a list of batches"
    elif type(data) is tuple and data and all(isinstance(one, Tensor) for one in data):
        mend = "InMemory(data, rows_per_step=32) to train on, batches(data, 32) to evaluate on, or a list of batches"
    elif isinstance(data, Mapping | str | bytes):
        mend = "a list of batches, a DataLoader or a Source"
    elif isinstance(data, IterableDataset) or _is_hugging_face(data, "IterableDataset"):
        mend = (
            "DataLoader(data, batch_size=32), or DataLoader(data, batch_size=None) where each item is already a batch"
        )
    elif _is_of(data, "cosmati.", "StreamingDataset"):
        mend = "StreamingSource(data, rows_per_step=32) to train on, or StreamingLoader(data, 32) to evaluate on"
    elif isinstance(data, Dataset) or _is_hugging_face(data, "Dataset"):
        mend = "DataLoader(data, batch_size=32, shuffle=True), or batch_size=None where each item is already a batch"
    else:
        return
    msg = f"A {kind} gives rows one by one, or no rows, and batches are meant. Give {mend}."
    raise DataError(msg)


def _is_hugging_face(data: object, name: str) -> bool:
    return _is_of(data, "datasets.", name)


def _is_of(data: object, package: str, name: str) -> bool:
    """Say whether something is of a class, without an import of its package."""
    return any(base.__name__ == name and base.__module__.startswith(package) for base in type(data).__mro__)


def refuse_shares(data: object) -> None:
    """Refuse a loader that gives this rank its share of the rows: the trainer would share that out again.

    Raises:
        DataError: it is split over several replicas.
    """
    for part, (number, place) in product(_parts(data), _SHARES):
        shares = getattr(part, number, None)
        if isinstance(shares, int) and shares > 1 and hasattr(part, place):
            mend = (
                "StreamingSource(dataset, rows_per_step=ALL_RANKS_TOGETHER) to train on, StreamingLoader(dataset, "
                "batch_size, rank=0, world=1) to evaluate on."
                if _is_of(data, "cosmati.", "StreamingLoader")
                else "DataLoader(dataset, batch_size=ALL_RANKS_TOGETHER, shuffle=True), without a distributed sampler "
                "and not prepared by accelerate."
            )
            msg = (
                f"The {type(data).__name__} gives each of {shares} ranks a share of its own ({type(part).__name__}), "
                "and the trainer, which expects the same batches on every rank, would share that out again: rows would "
                f"be left out. Give every rank the whole data: {mend}"
            )
            raise DataError(msg)


# PyTorch's DistributedSampler, accelerate's shards and state, Hugging Face's split data sets, our StreamingLoader, and
# the world of mosaicml-streaming's data sets.
_SHARES = (
    ("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"), ("world", "rank"),
    ("num_ranks", "rank"),
)  # fmt: skip


def _parts(data: object) -> Iterator[object]:
    """Yield a loader's own parts, in which orders and shares may lie."""
    batches = getattr(data, "batch_sampler", None)
    dataset = getattr(data, "dataset", None)
    yield from (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None), dataset)
    yield from (getattr(dataset, "_distributed", None), getattr(data, "state", None))
    yield getattr(dataset, "_unique_rank_world", None)


def own_generators(data: object) -> list[torch.Generator]:
    """Return the generators that a loader was given, each once."""
    found = (getattr(part, "generator", None) for part in _parts(data))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def has_known_order(data: object) -> bool:
    """Say whether a loader's order is a function of PyTorch's generators at the start of a pass, and of nothing else.

    Persistent workers carry their draws from one pass to the next, and so does a data set with generators of its own.
    """
    if not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__:
        return False
    if isinstance(data.dataset, IterableDataset) or data.persistent_workers or not getattr(data, "in_order", True):
        return False
    known = own_generators(data)
    if _draws(data.dataset, known) or _draws(data.collate_fn, known):
        return False
    batches = data.batch_sampler
    return type(_sampler(data)) in _KNOWN_SAMPLERS and (batches is None or type(batches) is BatchSampler)


def workers_live_on(data: object) -> bool:
    """Say whether a loader keeps its workers from pass to pass, and has none yet."""
    return isinstance(data, DataLoader) and data.persistent_workers and data._iterator is None  # noqa: SLF001


def refuse_going_on(data: object, num_passes: int, why: str, *, has_state: bool) -> NoReturn:
    """Refuse to go on with a loader that gives other batches than before.

    Args:
        data: the loader.
        num_passes: that were ended before.
        why: what is different.
        has_state: it restores itself from its own.

    Raises:
        DataError: always, with what to do about it.
    """
    begin = f"The {type(data).__name__} can't go on where the run stopped: {why}."
    if has_state:
        msg = (
            f"{begin} Its state doesn't say which batch comes next, or the data have changed. Have load_state_dict() "
            "restore the place within the pass too, use a Source, or start in a new folder."
        )
    elif getattr(data, "persistent_workers", False) and num_passes:
        msg = (
            f"{begin} Its workers carry their draws from pass to pass (persistent_workers=True), and those that a "
            "resume begins can't have them, or the data have changed. Leave that out, so that each pass draws by the "
            "seed, or use a Source, and start in a new folder."
        )
    else:
        msg = (
            f"The {type(data).__name__} can't go on where the run stopped: {why}. Its order isn't a function of "
            "the seed, or the data have changed. Give it a generator (DataLoader(..., generator=torch.Generator()."
            "manual_seed(0))) or a state (torchdata's StatefulDataLoader), use a Source, or start in a new folder."
        )
    raise DataError(msg)


def refuse_streams(data: object) -> None:
    """Refuse a loader over our own shards in a governed run: what its class ids mean, and bands, its data set knows.

    Raises:
        DataError: it's one.
    """
    part = data
    for _ in range(3):  # a loader, what reads for it, the data set
        if _is_of(part, "cosmati.", "StreamingDataset"):
            msg = (
                f"Under a policy, the rows of a StreamingDataset come by StreamingSource(dataset, rows_per_step=32), "
                f"which knows their classes and bands, and not by a {type(data).__name__}."
            )
            raise DataError(msg)
        part = getattr(part, "dataset", None)


def collates_by_default(data: object) -> bool:
    """Say whether a loader puts rows together as PyTorch does: it knows tensors, numbers and text, and no lineage."""
    return isinstance(data, DataLoader) and data.collate_fn is default_collate


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _draws(value: object, known: Sequence[torch.Generator], depth: int = 3) -> bool:
    """Say whether something holds a generator whose state isn't kept: a data set, a transform, a list of transforms."""
    if isinstance(value, types.ModuleType):
        return False  # `random` and `numpy`, whose own generators are keyed.
    if isinstance(value, _GENERATORS):
        return all(value is not one for one in known)
    held = list(value) if isinstance(value, list | tuple) else [*getattr(value, "__dict__", {}).values()]
    return depth > 0 and any(_draws(item, known, depth - 1) for item in held[:_LOOKED_AT])


_LOOKED_AT = 100
"""Attributes or items, of which a data set's rows in a list are none."""


def refuse_part(data: object, num_batches: int | None) -> None:
    """Refuse to measure on the first batches of data where there are none, or others each time.

    Raises:
        DataError: it isn't a number of batches, or the loader shuffles.
    """
    if num_batches is None:
        return
    if not isinstance(num_batches, int) or num_batches < 1:
        msg = f"num_batches={num_batches!r} is no number of batches. Give 1 or more; None takes all."
        raise DataError(msg)
    if shuffles(data):
        msg = (
            f"The first {num_batches} batches of a loader that shuffles are others each time, so that two evaluations "
            "couldn't be compared. Give it shuffle=False, or measure on all of it."
        )
        raise DataError(msg)


def shuffles(data: object) -> bool:
    """Say whether a loader draws its order."""
    return isinstance(data, DataLoader) and isinstance(_sampler(data), _SHUFFLING)


def _sampler(loader: DataLoader[Any]) -> object:
    """Return who orders a loader's rows: its batch sampler's sampler, where it has one."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
