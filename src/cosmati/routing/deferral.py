"""Deferred rows come again: their microbatches are moved to where a later phase admits their class.

The whole run is planned at setup from classes alone, without reading a row. Each position takes the source's next
microbatch that isn't deferred in its phase. What is passed over waits; once its class is admitted it takes every other
position, the oldest first, until nothing waits. So no position depends on how long the run will be. What is left at its
end is never offered, and the plan says so.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cosmati.core.batch import Batch
from cosmati.core.source import Order, TellsBands
from cosmati.routing.policy import CompiledPolicy


class DeferredOrder:
    """An order in which deferred microbatches change places with later ones (see `cosmati.core.source.Order`).

    It doesn't read ahead. Where a policy is changed in mid-run, positions are those that the new one gives from the
    start.

    Args:
        order: of the source.
        policy: compiled for the run.
        class_map: policy's class of each of the source's classes.
        num_microbatches: V.
        kind_of: policy's kind of rows of what the order calls a band.

    Attributes:
        never_offered: number of microbatches by the source's class for which the run has no room.
    """

    def __init__(
        self,
        order: Order,
        policy: CompiledPolicy,
        class_map: Sequence[int],
        num_microbatches: int,
        kind_of: Callable[[int], int] = int,
    ) -> None:
        self._order, self._kind_of = order, kind_of
        self._num = num_microbatches
        self.steps_per_epoch = order.steps_per_epoch
        self.rows_per_step = order.rows_per_step
        self._waiting: set[int] = set()
        self._places, self.never_offered = self._plan(policy, class_map)

    def _plan(self, policy: CompiledPolicy, class_map: Sequence[int]) -> tuple[NDArray[np.int64], Counter[int]]:
        places = np.empty(policy.phases[-1].end_step * self._num, np.int64)
        following, is_turn = 0, False
        for number, phase in enumerate(policy.phases):
            deferred = {
                (own, kind)
                for (own, c), kind in product(enumerate(class_map), range(len(policy.kinds)))
                if policy.decision[policy.row(c, kind)][number] == "defer"
            }
            ready = deque(sorted(place for place in self._waiting if self._kind_at(place) not in deferred))
            self._waiting.difference_update(ready)
            for at in range(phase.start_step * self._num, phase.end_step * self._num):
                is_turn = bool(ready) and not is_turn
                if is_turn:
                    places[at] = ready.popleft()
                else:
                    places[at], following = self._next(following, deferred)
            self._waiting.update(ready)
        return places, Counter(self._kind_at(place)[0] for place in self._waiting)

    def _next(self, following: int, deferred: Collection[tuple[int, int]]) -> tuple[int, int]:
        """Return the source's next place that isn't deferred, and the one after it; what is passed over waits."""
        for place in range(following, following + self.steps_per_epoch * self._num):
            if self._kind_at(place) not in deferred:
                return place, place + 1
            self._waiting.add(place)
        # Nothing of an epoch can be offered here: the position rests, and its rows come again.
        self._waiting.difference_update(range(following + 1, place + 1))
        return following, following + 1

    def _kind_at(self, place: int) -> tuple[int, int]:
        """Return class and kind of a microbatch."""
        class_id = self._order.class_id(*divmod(place, self._num))
        assert class_id is not None, "a governed source is route-pure"
        return class_id, self._kind_of(self._band_at(place))

    def _band_at(self, place: int) -> int:
        return self._order.band(*divmod(place, self._num)) if isinstance(self._order, TellsBands) else 0

    def _place(self, step: int, index: int) -> tuple[int, int]:
        return divmod(int(self._places[step * self._num + index]), self._num)

    def microbatch(self, step: int, index: int) -> Batch:
        """Return microbatch `index` of step `step`."""
        return self._order.microbatch(*self._place(step, index))

    def band(self, step: int, index: int) -> int:
        """Return the band of a microbatch, without reading its rows."""
        return self._band_at(int(self._places[step * self._num + index]))

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch, without reading its rows."""
        return self._order.class_id(*self._place(step, index))
