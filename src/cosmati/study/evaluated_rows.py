"""The sample of the rows that a run was evaluated on, read from its data."""

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
from cosmati.study.row_sample import smallest

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
            found = set(smallest([*found, *_digests(batch)]))
    except (BatchError, RuntimeError, TypeError):  # packed, sparse or made by hand: metrics can read what we can't
        return ()
    return smallest(found)


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
