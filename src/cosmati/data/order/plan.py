"""Which rows make up a microbatch: the order of a run as a pure function of step and microbatch.

Where routes are pure, a unit is a microbatch of one class (and band): the classes' units are interleaved in exact
long-run proportion, and within a class its sources' rows are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from cosmati.core.batch import TOMBSTONE
from cosmati.data.order.interleave import Interleave, Ints, PhasedInterleave, Stretch
from cosmati.data.order.mixture import Group, Mixture, whole_weights
from cosmati.errors import DataError

Tail = Literal["carry", "pad", "drop"]


def rows_each(rows_per_step: int, num_microbatches: int) -> int:
    """Return the rows of each microbatch of a step.

    Raises:
        DataError: V doesn't divide them.
    """
    rows, rest = divmod(rows_per_step, num_microbatches)
    if rest:
        fits = rows_per_step & -rows_per_step  # the largest power of two that does
        other = f", or RunConfig(num_microbatches={fits})" if fits > 1 else ""
        above = (rows + 1) * num_microbatches
        nearest = f"{rows * num_microbatches} or {above}" if rows else f"{above}"
        msg = (
            f"{rows_per_step} rows a step can't be split into V = {num_microbatches} microbatches of one shape. Use a "
            f"multiple of {num_microbatches} ({nearest} rows a step){other}."
        )
        raise DataError(msg)
    return rows


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of a microbatch; where padded, `sources` is `TOMBSTONE` and the rest 0.

    Attributes:
        class_id: the one class of all rows, None where mixed.
        band: their one band within it, 0 where mixed.
        sources: int64 [rows], index of the source.
        epochs: int64 [rows], which visit of the source.
        indices: int64 [rows], place in that visit's order.
    """

    class_id: int | None
    band: int
    sources: Ints
    epochs: Ints
    indices: Ints


@dataclass(frozen=True, slots=True)
class _Stream:
    """Sources that are dealt together."""

    class_id: int | None
    band: int
    sources: Ints
    mixture: Mixture


class RoutePlan:
    """Microbatches from sources.

    Args:
        groups: the sources.
        rows: R, rows of a microbatch.
        num_microbatches: V, microbatches of a step.
        route_pure: each microbatch is of one class and band.
        tail: what becomes of rows that don't fill a microbatch or a step. `carry`: nothing ends, each class goes on
            from one of its epochs into the next. `pad`: every row exactly once an epoch, the rest tombstones. `drop`:
            they're left out until the next epoch, which has others.
        phases: a curriculum: weight of each source by span of rows, in place of rows times repeat; with `carry` only.
        sort_by_class: sort each step's microbatches by class and band.

    Raises:
        DataError: there is nothing to visit, `rows` or `num_microbatches` is below 1, or, with `drop`, no step can be
            filled.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        rows: int,
        num_microbatches: int,
        route_pure: bool,
        tail: Tail = "carry",
        phases: Sequence[Stretch] | None = None,
        sort_by_class: bool = False,
    ) -> None:
        if rows < 1 or num_microbatches < 1 or tail not in get_args(Tail):
            msg = (
                f"A step of {num_microbatches} microbatches of {rows} rows with tail={tail!r} can't be planned. "
                f"Give at least 1 of each, and a tail of {', '.join(get_args(Tail))}."
            )
            raise DataError(msg)
        if phases and tail != "carry":
            raise DataError("A curriculum has no epochs to pad or to drop from. Use tail='carry'.")
        self.rows, self.num_microbatches, self.tail, self.sort_by_class = rows, num_microbatches, tail, sort_by_class
        keys = sorted({(g.class_id, g.band) for g in groups if g.rows and g.repeat}) if route_pure else [None]
        self._streams: list[_Stream] = []
        self._units: Interleave | PhasedInterleave
        for key in keys:
            own = [i for i, g in enumerate(groups) if key in (None, (g.class_id, g.band))]
            class_id, band = key or (None, 0)
            inner = (
                [Stretch(p.stop, tuple(p.weights[i] for i in own)) for p in phases] if phases and key is None else None
            )
            self._streams.append(_Stream(class_id, band, np.asarray(own), Mixture([groups[i] for i in own], inner)))
        if not self._streams:
            raise DataError("There is nothing to visit: the sources have no rows, or all repeats are 0.")
        visits = [stream.mixture.visits for stream in self._streams]
        self.num_rows = math.floor(sum(visits))
        per_step = rows * num_microbatches
        if tail == "carry":
            self._units, self._num_units = PhasedInterleave(self._unit_phases(visits, phases)), sys.maxsize
            self.steps_per_epoch = max(1, self.num_rows // per_step)
            return
        # Where a repeat makes a fraction of a visit, epochs differ by one row: the longest fits, the shortest fills.
        units = [_num_units(size, rows, tail) for size in visits]
        whole, rest = divmod(sum(units), num_microbatches)
        self.steps_per_epoch = whole + (1 if rest and tail == "pad" else 0)
        if not self.steps_per_epoch:
            msg = (
                f"{self.num_rows} rows don't fill one step of {per_step} with tail='drop'. Use fewer rows a step, "
                "or tail='carry' or 'pad'."
            )
            raise DataError(msg)
        self._units, self._num_units = Interleave(units), sum(units)

    def _unit_phases(self, visits: Sequence[Fraction], phases: Sequence[Stretch] | None) -> list[Stretch]:
        """Return the streams' weights by span of units; a span ends with the unit that its last row is in."""
        if phases is None or len(self._streams) == 1:
            return [Stretch(None, whole_weights(visits))]
        return [
            Stretch(
                None if phase.stop is None else -(-phase.stop // self.rows),
                tuple(sum(phase.weights[i] for i in stream.sources.tolist()) for stream in self._streams),
            )
            for phase in phases
        ]

    def _unit(self, step: int, index: int) -> tuple[int, _Stream, int | None]:
        """Return epoch (0 where none ends), stream and number of the unit in the stream's epoch; None if it's empty."""
        epoch, in_epoch = (0, step) if self.tail == "carry" else divmod(step, self.steps_per_epoch)
        places = range(self.num_microbatches) if self.sort_by_class else [index]
        units = in_epoch * self.num_microbatches + np.asarray(places)
        is_empty = units >= self._num_units
        # A microbatch of tombstones takes the class of the last real one: it needs some route, and weighs nothing.
        streams, numbers = self._units.locate(np.minimum(units, self._num_units - 1))
        place = int(np.argsort(streams, kind="stable")[index]) if self.sort_by_class else 0
        return epoch, self._streams[int(streams[place])], None if is_empty[place] else int(numbers[place])

    def class_of(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch, without looking at rows."""
        return self._unit(step, index)[1].class_id

    def band_of(self, step: int, index: int) -> int:
        """Return the band of a microbatch, without looking at rows."""
        return self._unit(step, index)[1].band

    def microbatch(self, step: int, index: int) -> PlannedRows:
        """Return the rows of microbatch `index` of step `step`."""
        epoch, stream, number = self._unit(step, index)
        if number is None:
            gone, zero = np.full(self.rows, TOMBSTONE), np.zeros(self.rows, np.int64)
            return PlannedRows(stream.class_id, stream.band, gone, zero, zero)
        start = stream.mixture.start(epoch) + number * self.rows
        sources, epochs, indices = stream.mixture.locate(np.arange(start, start + self.rows))
        sources = stream.sources[sources]
        if self.tail == "pad":
            gone_from = max(0, stream.mixture.start(epoch + 1) - start)
            sources[gone_from:], epochs[gone_from:], indices[gone_from:] = TOMBSTONE, 0, 0
        return PlannedRows(stream.class_id, stream.band, sources, epochs, indices)


def _num_units(visits: Fraction, rows: int, tail: Tail) -> int:
    return math.floor(visits) // rows if tail == "drop" else -(-math.ceil(visits) // rows)
