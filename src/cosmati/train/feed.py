"""Where `fit` takes its batches from: a source in keyed order, or whatever the user iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

from cosmati.core.batch import Batch, Data, Lineage, count_rows, first_tensor, map_tensors
from cosmati.core.clock import Clock
from cosmati.core.source import Order, ReadsAhead
from cosmati.errors import DataError
from cosmati.train.assembly import split_batch


class Feed(Protocol):
    """Gives this rank's microbatches of the step at which the clock stands."""

    steps_per_epoch: int | None
    is_positional: bool
    num_passes: int

    def whole(self, clock: Clock) -> Data | None:
        """Return the step's data whole, or None where the data have ended for good."""
        ...

    def microbatches(self, clock: Clock, mine: Sequence[int]) -> list[Batch] | None:
        """Return this rank's microbatches, or None where the data have ended for good."""
        ...

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of an early step once more, none where the data can't be read twice."""
        ...

    def class_ids(self, clock: Clock) -> list[int | None]:
        """Return the class of each of the step's V microbatches."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what the data need to go on, as JSON holds it."""
        ...

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Go on from a state."""
        ...


class OrderedFeed:
    """StepInput from a source's order: a pure function of the step."""

    is_positional = True
    num_passes = 0

    def __init__(self, order: Order, num_microbatches: int) -> None:
        self._order = order
        self._num_microbatches = num_microbatches
        self._expect = order.expect if isinstance(order, ReadsAhead) else None
        self.steps_per_epoch: int | None = order.steps_per_epoch

    def reordered(self, change: Callable[[Order], Order]) -> OrderedFeed:
        """Return the feed of another order of the same rows."""
        return OrderedFeed(change(self._order), self._num_microbatches)

    def whole(self, clock: Clock) -> Data | None:
        """Return the one microbatch of a step."""
        if self._expect:
            self._expect(clock.step, (0,))
        return self._order.microbatch(clock.step, 0)

    def microbatches(self, clock: Clock, mine: Sequence[int]) -> list[Batch]:
        """Return this rank's microbatches."""
        if self._expect:
            self._expect(clock.step, mine)
        return [self._order.microbatch(clock.step, index) for index in mine]

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of a step."""
        return [self._order.microbatch(step, index) for index in range(self._num_microbatches)]

    def class_ids(self, clock: Clock) -> list[int | None]:
        """Return the classes of the step's microbatches, without reading rows."""
        return [self._order.class_id(clock.step, index) for index in range(self._num_microbatches)]

    def state(self) -> Mapping[str, Any]:
        """Return nothing: the clock is the state."""
        return {}

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Do nothing: the clock is the state."""


class IterableFeed:
    """Step-sized batches from anything iterable: a list, a DataLoader, a generator.

    A list is read by position. A loader with `state_dict` and `load_state_dict` is asked to restore itself. Anything
    else starts over when a run resumes, and the plan says so.
    """

    def __init__(self, data: Iterable[Data], num_microbatches: int) -> None:
        self._data = data
        self._num_microbatches = num_microbatches
        self._iterator: Iterator[Data] | None = None
        self.num_passes = 0
        self._restores_itself = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self.is_positional = isinstance(data, Sequence) or self._restores_itself
        self.steps_per_epoch: int | None = len(data) if isinstance(data, Sized) else None
        if self.steps_per_epoch == 0:
            msg = (
                f"The {type(data).__name__} to train on is empty. With drop_last=True, a batch may be "
                "larger than the data."
            )
            raise DataError(msg)

    def microbatches(self, clock: Clock, mine: Sequence[int]) -> list[Batch] | None:
        """Return this rank's part of the next batch."""
        data = self.whole(clock)
        if data is None:
            return None
        parts = split_batch(as_batch(data, clock.rows), self._num_microbatches)
        return [parts[index] for index in mine]

    def whole(self, clock: Clock) -> Data | None:
        """Return the next batch as it is."""
        if isinstance(self._data, Sequence):
            return self._data[clock.step % len(self._data)]
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._data)
            data = next(self._iterator, None)
            if data is not None:
                return data
            self.num_passes += 1
            if self._iterator is self._data:
                # A generator has one pass in it.
                return None
            self._iterator = None
        return None

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of a list's batch; a loader is read once."""
        if not isinstance(self._data, Sequence) or step >= len(self._data):
            return ()
        return split_batch(as_batch(self._data[step], 0), self._num_microbatches)

    def class_ids(self, clock: Clock) -> list[int | None]:
        """Return that no class is known."""
        return [None] * self._num_microbatches

    def state(self) -> Mapping[str, Any]:
        """Return the loader's own state, where it has one."""
        return {"loader": self._data.state_dict()} if self._restores_itself else {}  # type: ignore[attr-defined]

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Hand the loader its state."""
        if "loader" in state and self._restores_itself:
            self._data.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._iterator = None


def as_batch(data: Data, first_row: int, *, trusted: bool = False) -> Batch:
    """Wrap the user's data, numbering its rows from `first_row`; a `Batch` is taken as it is.

    Args:
        data: the user's nest of tensors.
        first_row: id of its first row.
        trusted: count the first tensor's rows, and don't compare all tensors' (10 us).
    """
    if isinstance(data, Batch):
        return data
    if trusted and not isinstance(data, Mapping):
        return Batch(data, Lineage.of_rows(first_row, first_tensor(data).shape[0]), None)
    data = map_tensors(lambda tensor: tensor, data) if isinstance(data, Mapping) else data
    return Batch(data, Lineage.of_rows(first_row, count_rows(data)), None)
