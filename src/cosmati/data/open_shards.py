"""The shards that a process holds open, over all its sources."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cosmati.data.rows import ColumnValues


class Shard(Protocol):
    """Rows of one shard, whatever its format."""

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        ...

    def sample(self, row: int) -> memoryview:
        """Return a row as it's encoded."""
        ...

    def rows(self, indices: NDArray[np.int64], columns: Collection[str] | None = None) -> dict[str, ColumnValues]:
        """Return rows as columns, all of them or those named."""
        ...


class OpenShards:
    """Shards that are open, those used longest ago first; any thread may ask.

    Args:
        limit: how many stay.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Hold nothing, with a lock that no thread of the parent has."""
        # Reentrant, because a source may be collected, and so forgotten, at any point.
        self._lock = threading.RLock()
        self._shards: OrderedDict[tuple[int, int], Shard] = OrderedDict()
        self._owners: set[int] = set()

    def get(self, key: tuple[int, int]) -> Shard | None:
        """Return a shard of a source, if it's open."""
        with self._lock:
            found = self._shards.get(key)
            if found is not None:
                self._shards.move_to_end(key)
            return found

    def put(self, key: tuple[int, int], shard: Shard, *, owner: object) -> None:
        """Keep a shard open for as long as there is room, and its source."""
        with self._lock:
            if key[0] not in self._owners:
                self._owners.add(key[0])
                weakref.finalize(owner, self._forget, key[0]).atexit = False
            self._shards[key] = shard
            # A mapping that nobody holds any more closes itself.
            while len(self._shards) > self.limit:
                self._shards.popitem(last=False)

    def drop(self, key: tuple[int, int]) -> None:
        """Close a shard."""
        with self._lock:
            self._shards.pop(key, None)

    def clear(self) -> bool:
        """Close all; return whether there were any."""
        with self._lock:
            had_any = bool(self._shards)
            self._shards.clear()
            return had_any

    def _forget(self, owner: int) -> None:
        with self._lock:
            self._owners.discard(owner)
            for key in [key for key in self._shards if key[0] == owner]:
                del self._shards[key]


def _max_mapped() -> int:
    """Return how many files a process may keep mapped: of its mappings, a sixteenth. No handle is held for them."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        limit = 1 << 16
    return max(16, min(1024, limit // 16))


MAPPED = OpenShards(_max_mapped())
"""The process's mapped shards, of all its sources together."""
