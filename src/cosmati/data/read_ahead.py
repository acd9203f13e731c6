"""Fetches shards before they're read: the order says which come next.

    part n is read -> parts n + 1, n + 2 ... need windows -> their shards, in order -> threads -> cache

Reading ahead changes nothing but the time. An error of a fetch is left to whoever reads the shard and meets it too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from cosmati.core.batch import TOMBSTONE
from cosmati.data.opened import OpenedSource
from cosmati.data.order.interleave import Ints
from cosmati.data.order.shards import ShardOrder

Upcoming = Callable[[int], tuple[Ints, Ints, Ints]]
"""Returns sources, epochs and indices of the rows of a part, by its number: int64 [rows] each."""

_NUM_THREADS = 16
"""Requests under way: at 100 ms and shards of 1 MB they carry 160 MB a second."""
_PARTS_AT_ONCE = 64
"""Parts that are looked at in one call."""


class _Shard(NamedTuple):
    part: int
    source: OpenedSource
    number: int
    num_bytes: int


class ReadAhead:
    """Fetches, in threads, what the order needs next.

    Args:
        sources: of the data set.
        orders: of each source's rows.
        upcoming: the parts in which the rows will be read.
        max_bytes: of the shards that are asked for and belong to parts beyond the one that is read.
        max_parts: how far to look: an epoch, after which all that fits has been asked for.
    """

    def __init__(
        self,
        sources: Sequence[OpenedSource],
        orders: Sequence[ShardOrder],
        upcoming: Upcoming,
        *,
        max_bytes: int,
        max_parts: int,
    ) -> None:
        self._sources, self._orders, self._upcoming = sources, orders, upcoming
        self._max_bytes, self._max_parts = max_bytes, max_parts
        self._reach: dict[int, tuple[int, int]] = {}
        self._found: deque[_Shard] = deque()
        self._asked: deque[_Shard] = deque()
        self._ahead = 0
        self._next = 0
        self._queue: SimpleQueue[_Shard | None] = SimpleQueue()
        self.is_closed = False
        # Reentrant, because whoever owns this may be collected, and so close it, at any point.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def go_on(self, part: int) -> None:
        """Ask for what comes next.

        Args:
            part: the one that is read now; it never falls.
        """
        while self._asked and self._asked[0].part <= part:
            self._ahead -= self._asked.popleft().num_bytes
        self._next = max(self._next, part)
        for _ in range(_PARTS_AT_ONCE):
            while self._found and self._may_ask(self._found[0]):
                shard = self._found.popleft()
                if shard.part > part:
                    self._asked.append(shard)
                    self._ahead += shard.num_bytes
                self._queue.put(shard)
                if shard.part <= part or not self._threads:
                    self._start_another()
            if self._found or self._next > part + self._max_parts:
                return
            self._look_at(self._next)
            self._next += 1

    def close(self) -> None:
        """Ask for nothing more; what is under way goes on."""
        with self._lock:
            self.is_closed = True
        for _ in self._threads:
            self._queue.put(None)

    def wait(self) -> None:
        """After closing, wait until nothing is under way: no thread may hold a lock when workers are forked."""
        for thread in self._threads:
            thread.join()

    def _start_another(self) -> None:
        with self._lock:
            if len(self._threads) < _NUM_THREADS and not self.is_closed:
                # As daemons they don't hold up a process that ends; what they leave half fetched, the next one sweeps.
                thread = threading.Thread(target=self._fetch, daemon=True, name="cosmati-ahead")
                thread.start()
                self._threads.append(thread)
                if self.is_closed:  # by a collection in between, which didn't know of this one
                    self._queue.put(None)

    def _may_ask(self, shard: _Shard) -> bool:
        # What the part that is read needs comes before all that is further ahead, so nothing is asked for then.
        return not self._asked or self._ahead + shard.num_bytes <= self._max_bytes

    def _look_at(self, part: int) -> None:
        """Find the shards that a part is the first to need: whole windows, since their rows are mixed."""
        sources, epochs, indices = self._upcoming(part)
        for number in np.unique(sources[sources != TOMBSTONE]).tolist():
            source, order = self._sources[number], self._orders[number]
            if not source.is_remote:
                continue
            mine = np.flatnonzero(sources == number)
            first, last = ((int(epochs[i]), int(indices[i])) for i in (mine[0], mine[-1]))
            reach = max(first, self._reach.get(number, first))
            while reach <= last:
                epoch, index = reach
                shards, stop = order.window_of(epoch, index)
                self._found += [_Shard(part, source, n, source.index.shard(n).raw.num_bytes) for n in shards.tolist()]
                reach = (epoch, stop) if stop < order.num_rows else (epoch + 1, 0)
            self._reach[number] = reach

    def _fetch(self) -> None:
        while (shard := self._queue.get()) is not None:
            if not self.is_closed:
                with suppress(Exception):
                    shard.source.fetch(shard.number)
                # Two more for each that has come: what is needed first doesn't share the line with what isn't yet.
                with suppress(RuntimeError):  # the process ends, or has no room for more
                    self._start_another()
                    self._start_another()


def fetch_from_here(sources: Sequence[OpenedSource]) -> None:
    """Have workers that are forked from now on leave to this process what it's going to fetch ahead."""
    for source in sources:
        source.fetcher = os.getpid()
