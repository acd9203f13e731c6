"""Where rows lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows lie.

    Attributes:
        sources: int64 [rows], index of the source.
        epochs: int64 [rows], which visit of the source.
        shards: int64 [rows].
        rows: int64 [rows], within the shard.
    """

    sources: NDArray[np.int64]
    epochs: NDArray[np.int64]
    shards: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """All four, in order."""
        return self.sources, self.epochs, self.shards, self.rows
