"""Where `fit` takes its batches from: a source in keyed order, or whatever the user iterates over.

A source cuts its steps itself. Everything else is given whole, as in a loop of the user's own, and is cut there as here
(`split_step`): under a policy, rows of several classes are regrouped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data import DataLoader

from cosmati.core.batch import Batch, Data
from cosmati.core.clock import Clock
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.core.source import Order, ReadsAhead, ResizesImages
from cosmati.data.foreign import (
    collates_by_default,
    has_known_order,
    own_generators,
    refuse_going_on,
    refuse_rows,
    refuse_shares,
    refuse_streams,
    workers_live_on,
)
from cosmati.errors import DataError
from cosmati.train.by_position import ByPosition
from cosmati.train.content import content_digest
from cosmati.train.ranks import Ranks
from cosmati.train.seen import Kept, LastGiven
from cosmati.train.step_rows import as_batch, refuse_untold, split_batch


class Feed(Protocol):
    """Gives this rank's microbatches of the step at which the clock stands."""

    steps_per_epoch: int | None
    is_positional: bool
    num_passes: int
    has_ended: bool
    generators: Sequence[torch.Generator]
    sees_changes: bool

    @property
    def doubt(self) -> str:
        """Why a resume may be given other rows, in words; empty as far as is known."""
        ...

    def whole(self, clock: Clock) -> Data | None:
        """Return the step's data whole, or None where the data have ended for good."""
        ...

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of an early step once more, none where the data can't be read twice."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what the data need to go on: a nest of plain values (see `core/plain.py`)."""
        ...

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Go on from a state."""
        ...

    def close(self) -> None:
        """Let go of processes that read ahead; they're started again when more is asked for."""
        ...


class OrderedFeed:
    """A step's rows from a source's order: a pure function of the step.

    Args:
        order: of the source.
        num_microbatches: V.
        is_whole: the order's one microbatch is a step of rows of several classes.
    """

    is_positional = True
    num_passes = 0
    has_ended = sees_changes = False
    generators: Sequence[torch.Generator] = ()
    doubt = ""

    def __init__(self, order: Order, num_microbatches: int, *, is_whole: bool = False) -> None:
        self._order, self.is_whole = order, is_whole
        self._num_microbatches = num_microbatches
        self._expect = order.expect if isinstance(order, ReadsAhead) else None
        self.steps_per_epoch: int | None = order.steps_per_epoch

    def reordered(self, change: Callable[[Order], Order]) -> OrderedFeed:
        """Return the feed of another order of the same rows."""
        return OrderedFeed(change(self._order), self._num_microbatches)

    @property
    def decoder(self) -> ResizesImages | None:
        """The order, where it can give images in the size that a step wants."""
        return self._order if isinstance(self._order, ResizesImages) else None

    def whole(self, clock: Clock) -> Data | None:
        """Return the one microbatch of a step."""
        if self._expect:
            self._expect(clock.step, (0,))
        batch = self._order.microbatch(clock.step, 0)
        if self.is_whole:
            refuse_untold(batch, self._order)
        return batch

    def microbatches(self, clock: Clock, mine: Sequence[int]) -> list[Batch]:
        """Return this rank's microbatches."""
        if self._expect:
            self._expect(clock.step, mine)
        return [self._order.microbatch(clock.step, index) for index in mine]

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of a step."""
        if self.is_whole:
            return split_batch(self._order.microbatch(step, 0), self._num_microbatches, by_class=True)
        return [self._order.microbatch(step, index) for index in range(self._num_microbatches)]

    def class_ids(self, clock: Clock) -> list[int | None]:
        """Return the classes of the step's microbatches, without reading rows."""
        return [self._order.class_id(clock.step, index) for index in range(self._num_microbatches)]

    def state(self) -> Mapping[str, Any]:
        """Return nothing: the clock is the state."""
        return {}

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Do nothing: the clock is the state."""

    def close(self) -> None:
        """Do nothing: an order has no place of its own."""


def in_microbatches(feed: Feed | None) -> OrderedFeed | None:
    """Return a feed that gives microbatches; None where a step comes whole."""
    return feed if isinstance(feed, OrderedFeed) and not feed.is_whole else None


class IterableFeed:
    """Step-sized batches from anything iterable: a list, a DataLoader, a generator.

    A list is read by position. A loader with `state_dict` and `load_state_dict` is asked to restore itself. Anything
    else that can be iterated over again begins its pass anew when a run resumes, and the batches already seen are read
    and dropped; the plan holds that for a promise only where the order is known to be the same.

    What is drawn while a batch is made in this process, a shuffling loader's order among it, is keyed by the run's
    seed, the pass and the batch. A loader's own `generator=` is left to it, and its state is kept.

    Args:
        data: iterable of batches.
        num_microbatches: V.
        seed: of the run.
        generators: seeded before each batch; None leaves them alone.
        ranks: each of which has to be given the same batches; None where there's one.
        class_names: of a governed run, whose batches have to say the classes of their rows; empty without a policy.

    Attributes:
        has_ended: asked for a batch, the data had none, and would have none in another pass.
        num_passes: passes that have ended.
        generators: the loader's own.
        sees_changes: it refuses rows that a step has changed in place.

    Raises:
        DataError: it's empty, gives rows instead of batches, or only this rank's share of them.
        PlanError: it's governed, and can't ever say of which classes its rows are.
    """

    def __init__(
        self,
        data: Iterable[Data],
        num_microbatches: int,
        *,
        seed: int = 0,
        generators: DefaultGenerators | None = None,
        ranks: Ranks | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        is_governed = bool(class_names)
        refuse_rows(data)
        refuse_shares(data)
        if is_governed:
            refuse_streams(data)
        if is_governed and (collates_by_default(data) or type(data) in (list, tuple)):
            refuse_untold(None if isinstance(data, DataLoader) else next(iter(data), None), data)
        self._data = data
        self._num_microbatches = num_microbatches
        self._key = partial(position_key, seed, "data")
        self._generators = generators
        self._ranks, self._is_governed, self._class_names = ranks or Ranks.alone(), is_governed, class_names
        self._iterator: Iterator[Data] | None = None
        self._given_last: tuple[int, Data | None] = (-1, None)
        self._was_closed = False
        self._seen = 0
        self._stands_at = 0
        self._may_restart: bool
        self._first: str | None = None
        self._last = LastGiven()
        self.num_passes = 0
        self.has_ended, self.sees_changes = False, True
        self.generators: Sequence[torch.Generator] = own_generators(data)
        self._own_at_start = [generator.get_state() for generator in self.generators]
        self._by_position = ByPosition(data, self._seed_step) if isinstance(data, Sequence) else None
        restores_itself = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self._kept = Kept(data) if restores_itself and self._by_position is None else None
        self.is_positional = bool(self._by_position or self._kept) or has_known_order(data)
        self.steps_per_epoch = _length(data)
        if self.steps_per_epoch == 0:
            msg = (
                f"The {type(data).__name__} to train on is empty. With drop_last=True, a batch may be "
                "larger than the data."
            )
            raise DataError(msg)

    @property
    def doubt(self) -> str:
        """Why a resume may be given other rows, or was given them."""
        return self._kept.doubt if self._kept is not None else ""

    def whole(self, clock: Clock) -> Data | None:
        """Return the next batch as it is."""
        if self._by_position is not None:
            data = self._by_position.read(clock.step)
        else:
            data = self._taken(clock)
            self._ranks.refuse_unlike_end(clock.step, self.num_passes, data)
        if self._is_governed and data is not None:
            refuse_untold(data, self._data)
        return data

    def _taken(self, clock: Clock) -> Data | None:
        if self._was_closed and self._given_last[0] == clock.step:
            self._last.refuse_changed(clock.step)  # That step was never committed: it has failed, and somebody goes on.
            return self._given_last[1]
        if self.has_ended:
            return None
        if self._iterator is None:
            self._begin_pass()
        data = self._next()
        if data is _END:
            self.num_passes += 1
            self._seen, self._first = 0, None
            self._last.forget()
            self._begin_pass()
            data = self._next()
        self.has_ended = data is _END
        self._given_last, self._was_closed = (clock.step, None if self.has_ended else data), False
        return None if self.has_ended else data

    def _begin_pass(self) -> None:
        """Start a pass, or go on where a loader's state says, and drop the batches that have been seen already."""
        after = self._own_at_start
        if self._seen and self.num_passes and workers_live_on(self._data):
            self._begin_workers()
        if self._seen and self._kept is None:
            self._put_back(after)
        elif self._kept is not None and not self._seen:
            self._kept.begin_pass()
        self._own_at_start = [generator.get_state() for generator in self.generators]
        self._seed(0)
        self._iterator = iter(self._data)
        seen, last, self._seen = self._seen, self._last.digest(), self._stands_at
        self._stands_at = 0
        again = seen - self._seen
        self._may_restart = bool(seen) and not again
        for _ in range(again):
            if self._next() is _END:
                self._refuse_skipping(f"it ended after {self._seen} batches, and {seen} of this pass were seen")
        if again and last not in (None, self._last.digest()):
            self._differs(f"batch {seen - 1} of this pass, the last one seen, is another one now")
        if self._kept is not None and seen:
            self._put_back(after)

    def _begin_workers(self) -> None:
        """Begin workers that live on as the first pass did: a later one asks those that are there, and draws less."""
        if self._generators is not None:
            self._generators.seed(self._key(0, 0))
        iter(self._data)

    def _next(self) -> Data:
        """Return the next batch of the pass, or `_END`."""
        assert self._iterator is not None, "a pass has begun"
        if self._kept is not None:
            self._kept.before(self._seen)
        if self._seen:
            # The first batch's draws follow those that start the pass: a shuffling loader makes both at once.
            self._seed(self._seen)
        self._last.look()
        data = next(self._iterator, _END)
        if data is None:
            msg = f"The {type(self._data).__name__} gave None for a batch. Leave the batch out, or end the iteration."
            raise DataError(msg)
        if data is not _END:
            if not self._seen:
                self._compare(content_digest(data).hex())
            elif self._may_restart and content_digest(data).hex() == self._first:
                self._refuse_skipping("it gives the first batch of this pass again")
            self._may_restart = False
            self._seen += 1
            self._last.note(data)
        return data

    def _differs(self, why: str) -> None:
        """Refuse rows that aren't those of the run that was stopped; a state has nothing of what workers draw."""
        if self._kept is None or not getattr(self._data, "num_workers", 0):
            self._refuse_skipping(why)
        self._kept.doubt = f"{why}: the state of {type(self._data).__name__} doesn't have what its workers draw"
        warnings.warn(f"The run goes on with other rows than it would have had: {self._kept.doubt}.", stacklevel=2)

    def _seed_step(self, step: int) -> None:
        if self._generators is not None:
            self._generators.seed(self._key(step))

    def _seed(self, index: int) -> None:
        if self._generators is not None:
            self._generators.seed(self._key(self.num_passes, index))

    def _compare(self, digest: str) -> None:
        """Take note of a pass's first batch; where the pass is begun anew, it has to be the same one."""
        if self._first not in (None, digest):
            self._refuse_skipping("its first batch isn't the one that this pass began with")
        self._first = digest

    def _refuse_skipping(self, why: str) -> NoReturn:
        refuse_going_on(self._data, self.num_passes, why, has_state=self._kept is not None)

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of a list's batch; a loader is read once."""
        if self._by_position is None or step >= (self.steps_per_epoch or 0):
            return ()
        batch = as_batch(self._by_position.read(step), 0, pieces=self._num_microbatches)
        told = batch.numbered_by(self._class_names) if self._is_governed else batch
        return split_batch(told, self._num_microbatches, by_class=self._is_governed)

    def state(self) -> Mapping[str, Any]:
        """Return the place in the pass, and the loader's own state or its generators' at the pass's start."""
        if self._by_position is not None:
            return self._by_position.state()
        seen = {"first": self._first, "last": self._last.digest()}
        place = {"passes": self.num_passes, "batches": self._seen} | seen
        if self._kept is not None:
            now = [generator.get_state() for generator in self.generators]
            return place | self._kept.state(self._seen) | {"generators": now}
        return place | {"generators": list(self._own_at_start)}

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Hand the loader its state, or skip forward to the place.

        Raises:
            DataError: it can be iterated over only once, and has been.
        """
        if self._by_position is not None:
            self._by_position.restore(state)
            return
        self._iterator, self._was_closed = None, False
        self.num_passes = state.get("passes", clock.epoch)
        self._seen = state.get("batches", clock.step_in_epoch)
        self._first, self._last = state.get("first"), LastGiven(state.get("last"))
        self._own_at_start = state.get("generators", self._own_at_start)
        if len(self._own_at_start) != len(self.generators):
            was, now = len(self._own_at_start), len(self.generators)
            self._refuse_skipping(f"it had {was} generators of its own, and has {now}")
        if self._kept is not None:
            self._stands_at = self._kept.restore(state, self._seen)
        elif isinstance(self._data, Iterator) and clock.step:
            self._refuse_skipping("it can be iterated over only once, and how far it is can't be told")
        if self._kept is None or self._stands_at == self._seen:  # Else they're of later than the loader's state is.
            self._put_back(self._own_at_start)

    def _put_back(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def close(self) -> None:
        """End a loader's workers; who asks for more begins the pass anew, and skips forward."""
        self._was_closed = True
        (self._by_position or self._last).look()
        if self._kept is None and not isinstance(self._data, Iterator):
            self._iterator = None


_END = object()
"""Stands for a batch where a pass has no more."""


def _length(data: Iterable[Data]) -> int | None:
    """Return the number of batches, where it's known: a DataLoader over a stream has a `__len__`, which raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except (TypeError, NotImplementedError):
        return None
