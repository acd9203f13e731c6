"""A small sample of the rows that something was evaluated on, by which two sets of rows can be compared.

It is the smallest digests of the rows (a bottom-k sketch: Cohen and Kaplan 2007, doi:10.1145/1281100.1281133), so it
depends neither on the rows' order nor on how they're cut into batches, and shows sets that overlap in part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.core.batch import Batch, count_rows
from cosmati.core.containers import Data
from cosmati.core.nest import arrays
from cosmati.errors import BatchError

SAMPLE_SIZE = 128
_DIGEST_BYTES = 6


def row_sample(data: Iterable[Data]) -> tuple[str, ...]:
    """Return the smallest digests of the rows of batches, in order, as hex.

    Args:
        data: batches in a list or a tuple. Others, such as a loader, aren't read once more for this.

    Returns:
        At most `SAMPLE_SIZE` digests; none where the rows aren't known: no list, or batches whose rows can't be told.
    """
    if not isinstance(data, list | tuple):
        return ()
    found: set[str] = set()
    try:
        for batch in data:
            found = set(_smallest([*found, *_digests(batch)]))
    except (BatchError, RuntimeError, TypeError):  # packed, sparse or made by hand: metrics can read what we can't
        return ()
    return _smallest(found)


def joined(samples: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the sample of several sets' rows together; none where those of any set aren't known."""
    found = list(samples)
    return _smallest({digest for one in found for digest in one}) if all(found) else ()


def shared_share(one: tuple[str, ...], other: tuple[str, ...]) -> float | None:
    """Return about which share of the rows of the smaller of two sets is in the other one, too; None if unknown."""
    # Up to the least of the samples' ends both sets are known whole.
    ends = [sample[-1] for sample in (one, other) if len(sample) == SAMPLE_SIZE]
    known = [{digest for digest in sample if not ends or digest <= min(ends)} for sample in (one, other)]
    fewest = min(len(digests) for digests in known)
    return len(known[0] & known[1]) / fewest if fewest else None


def _smallest(digests: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(digests)[:SAMPLE_SIZE])


def _digests(batch: Data) -> Iterator[str]:
    nest = batch.data if isinstance(batch, Batch) else batch
    num_rows = count_rows(nest)
    columns = [_as_bytes(one, num_rows) for one in arrays(nest) if one.ndim and len(one) == num_rows]
    for row in range(num_rows if columns else 0):
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for column in columns:
            digest.update(column[row].data)
        yield digest.hexdigest()


def _as_bytes(array: Tensor | NDArray[np.generic], num_rows: int) -> NDArray[np.uint8]:
    tensor = array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor.reshape(num_rows, -1).contiguous().view(torch.uint8).numpy()
