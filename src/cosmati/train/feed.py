"""Where `fit` takes its batches from: a source in keyed order, or whatever the user iterates over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from cosmati.core.batch import Batch, Data, Lineage, count_rows, count_rows_and_tokens, map_tensors
from cosmati.core.clock import Clock
from cosmati.core.nest import leaves
from cosmati.core.rng import DefaultGenerators, position_key
from cosmati.core.source import Order, ReadsAhead
from cosmati.core.state import parameter_root
from cosmati.data.foreign import has_known_order, own_generators, refuse_rows, refuse_shares
from cosmati.errors import DataError
from cosmati.train.assembly import split_batch


class Feed(Protocol):
    """Gives this rank's microbatches of the step at which the clock stands."""

    steps_per_epoch: int | None
    is_positional: bool
    num_passes: int
    has_ended: bool
    generators: Sequence[torch.Generator]

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
        """Return what the data need to go on: a nest of plain values (see `core/plain.py`)."""
        ...

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Go on from a state."""
        ...

    def close(self) -> None:
        """Let go of processes that read ahead; they're started again when more is asked for."""
        ...


class OrderedFeed:
    """StepInput from a source's order: a pure function of the step."""

    is_positional = True
    num_passes = 0
    has_ended = False
    generators: Sequence[torch.Generator] = ()

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

    def close(self) -> None:
        """Do nothing: an order has no place of its own."""


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

    Attributes:
        has_ended: asked for a batch, the data had none, and would have none in another pass.
        num_passes: passes that have ended.
        generators: the loader's own.

    Raises:
        DataError: it's empty, gives rows instead of batches, or only this rank's share of them.
    """

    def __init__(
        self,
        data: Iterable[Data],
        num_microbatches: int,
        *,
        seed: int = 0,
        generators: DefaultGenerators | None = None,
    ) -> None:
        refuse_rows(data)
        refuse_shares(data)
        self._data = data
        self._num_microbatches = num_microbatches
        self._key = partial(position_key, seed, "data")
        self._generators = generators
        self._iterator: Iterator[Data] | None = None
        self._given_last: tuple[int, Data | None] = (-1, None)
        self._was_closed = False
        self._seen = 0
        self._first: str | None = None
        self._last: tuple[Data, tuple[int, ...]] | None = None
        self._last_seen: str | None = None
        self._given: dict[int, tuple[int, ...]] = {}
        self.num_passes = 0
        self.has_ended = False
        self.generators: Sequence[torch.Generator] = own_generators(data)
        self._own_at_start = [generator.get_state() for generator in self.generators]
        self._restores_itself = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        self.is_positional = isinstance(data, Sequence) or self._restores_itself or has_known_order(data)
        self.steps_per_epoch = _length(data)
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
        parts = split_batch(as_batch(data, clock.rows, pieces=self._num_microbatches), self._num_microbatches)
        return [parts[index] for index in mine]

    def whole(self, clock: Clock) -> Data | None:
        """Return the next batch as it is."""
        if isinstance(self._data, Sequence):
            return self._read(self._data, clock.step)
        if self._was_closed and self._given_last[0] == clock.step:
            return self._given_last[1]  # That step was never committed: it has failed, and somebody goes on.
        if self.has_ended:
            return None
        if self._iterator is None:
            self._begin_pass()
        data = self._next()
        if data is _END:
            self.num_passes += 1
            self._seen, self._first, self._last, self._last_seen = 0, None, None, None
            self._begin_pass()
            data = self._next()
        self.has_ended = data is _END
        self._given_last, self._was_closed = (clock.step, None if self.has_ended else data), False
        return None if self.has_ended else data

    def _read(self, data: Sequence[Data], step: int) -> Data:
        """Read a step's batch by position; what isn't a plain list may draw while it does."""
        index = step % len(data)
        if type(data) in (list, tuple):
            self._refuse_changed(data[index], index)
        elif self._generators is not None:
            self._generators.seed(self._key(step))
        return data[index]

    def _refuse_changed(self, batch: Data, index: int) -> None:
        """Refuse a list's batch that a loss has changed in place: who resumes has the list as it was."""
        versions = _versions(batch)
        if self._given.setdefault(index, versions) != versions:
            msg = (
                f"Batch {index} of the data was changed in place since a step was given it, by the loss or by the "
                "model's first layers: each pass would train on other rows, and a run that resumes has the list as it "
                "was. Let the loss change a copy (x = x.clone(); ReLU without inplace=True), or give a Source, which "
                "gives copies: InMemory(...)."
            )
            raise DataError(msg)

    def _begin_pass(self) -> None:
        """Start a pass, and drop the batches of it that have been seen already."""
        if self._seen and not self._restores_itself:
            self._put_back()
        self._own_at_start = [generator.get_state() for generator in self.generators]
        self._seed(0)
        self._iterator = iter(self._data)
        if self._restores_itself:
            return
        seen, self._seen, last = self._seen, 0, self._last_digest()
        for _ in range(seen):
            if self._next() is _END:
                self._refuse_skipping(f"it ended after {self._seen} batches, and {seen} of this pass were seen")
        if seen and last not in (None, self._last_digest()):
            self._refuse_skipping(f"batch {seen - 1} of this pass, the last one seen, is another one now")

    def _next(self) -> Data:
        """Return the next batch of the pass, or `_END`."""
        assert self._iterator is not None, "a pass has begun"
        if self._seen:
            # The first batch's draws follow those that start the pass: a shuffling loader makes both at once.
            self._seed(self._seen)
        data = next(self._iterator, _END)
        if data is None:
            msg = f"The {type(self._data).__name__} gave None for a batch. Leave the batch out, or end the iteration."
            raise DataError(msg)
        if data is not _END:
            if not (self._seen or self._restores_itself):
                self._compare(_digest(data))
            self._seen += 1
            # Its digest is for checkpoints: hashing each batch would cost more than some steps.
            self._last = None if self._restores_itself else (data, _versions(data))
        return data

    def _last_digest(self) -> str | None:
        """Return the digest of the last batch seen; None where it isn't known, or a loss has changed it in place."""
        if self._last is not None:
            data, versions = self._last
            self._last_seen = _digest(data) if versions == _versions(data) else None
            self._last = None
        return self._last_seen

    def _seed(self, index: int) -> None:
        if self._generators is not None:
            self._generators.seed(self._key(self.num_passes, index))

    def _compare(self, digest: str) -> None:
        """Take note of a pass's first batch; where the pass is begun anew, it has to be the same one."""
        if self._first not in (None, digest):
            self._refuse_skipping("its first batch isn't the one that this pass began with")
        self._first = digest

    def _refuse_skipping(self, why: str) -> NoReturn:
        msg = (
            f"The {type(self._data).__name__} can't go on where the run stopped: {why}. Its order isn't a function of "
            "the seed, or the data have changed. Give it a generator (DataLoader(..., generator=torch.Generator()."
            "manual_seed(0))) or a state (torchdata's StatefulDataLoader), use a Source, or start in a new folder."
        )
        raise DataError(msg)

    def again(self, step: int) -> Sequence[Batch]:
        """Return all microbatches of a list's batch; a loader is read once."""
        if not isinstance(self._data, Sequence) or step >= len(self._data):
            return ()
        batch = as_batch(self._read(self._data, step), 0, pieces=self._num_microbatches)
        return split_batch(batch, self._num_microbatches)

    def class_ids(self, clock: Clock) -> list[int | None]:
        """Return that no class is known."""
        return [None] * self._num_microbatches

    def state(self) -> Mapping[str, Any]:
        """Return the place in the pass, and the loader's own state or its generators' at the pass's start."""
        if isinstance(self._data, Sequence):
            return {}
        place = {"passes": self.num_passes, "batches": self._seen}
        if self._restores_itself:
            return place | {"loader": self._data.state_dict()}  # type: ignore[attr-defined]
        seen = {"first": self._first, "last": self._last_digest()}
        return place | seen | {"generators": list(self._own_at_start)}

    def restore(self, state: Mapping[str, Any], clock: Clock) -> None:
        """Hand the loader its state, or skip forward to the place.

        Raises:
            DataError: it can be iterated over only once, and has been.
        """
        if isinstance(self._data, Sequence):
            return
        self._iterator, self._was_closed = None, False
        self.num_passes = state.get("passes", clock.epoch)
        self._seen = state.get("batches", clock.step_in_epoch)
        if self._restores_itself:
            if "loader" in state:
                self._data.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            return
        if isinstance(self._data, Iterator) and clock.step:
            self._refuse_skipping("it can be iterated over only once, and how far it is can't be told")
        self._first, self._last, self._last_seen = state.get("first"), None, state.get("last")
        self._own_at_start = state.get("generators", self._own_at_start)
        if len(self._own_at_start) != len(self.generators):
            was, now = len(self._own_at_start), len(self.generators)
            self._refuse_skipping(f"it had {was} generators of its own, and has {now}")
        self._put_back()

    def _put_back(self) -> None:
        for generator, state in zip(self.generators, self._own_at_start, strict=True):
            generator.set_state(state)

    def close(self) -> None:
        """End a loader's workers; who asks for more begins the pass anew, and skips forward."""
        self._was_closed = True
        if not (self._restores_itself or isinstance(self._data, Iterator)):
            self._iterator = None


_END = object()
"""Stands for a batch where a pass has no more."""


def _length(data: Iterable[Data]) -> int | None:
    """Return the number of batches, where it's known: a DataLoader over a stream has a `__len__`, which raises."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _digest(data: Data) -> str:
    """Return the digest of a batch's tensors on CPU; to look at others would wait for an accelerator."""
    found = leaves(data.data if isinstance(data, Batch) else data)
    tensors = [leaf for leaf in found if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.is_cpu]
    return parameter_root({str(index): tensor for index, tensor in enumerate(tensors)}).hex()


def _versions(data: Data) -> tuple[int, ...]:
    """Return how often a batch's tensors were changed in place."""
    data = data.data if isinstance(data, Batch) else data
    with suppress(AttributeError, RuntimeError):  # What isn't a tensor, or is one of inference mode.
        if type(data) in (tuple, list, dict):  # The usual case, in a microsecond.
            return tuple([leaf._version for leaf in (data.values() if type(data) is dict else data)])  # noqa: SLF001
    found = (leaf for leaf in leaves(data) if isinstance(leaf, Tensor))
    return tuple(leaf._version for leaf in found if not leaf.is_inference())  # noqa: SLF001


def as_batch(data: Data, first_row: int, *, trusted: bool = False, pieces: int = 1) -> Batch:
    """Wrap the user's data, numbering its rows from `first_row`; a `Batch` is taken as it is.

    Args:
        data: the user's nest of tensors.
        first_row: id of its first row.
        trusted: count the first tensor's rows, and don't compare all tensors' (10 us).
        pieces: into how many microbatches it's going to be cut.

    Raises:
        BatchError: its rows can't be counted, or can in two ways, or a `Batch`'s lineage is of others.
    """
    if isinstance(data, Batch):
        if not trusted:
            data.check()
        return data
    if trusted and not isinstance(data, Mapping):
        return Batch(data, Lineage.of_rows(first_row, count_rows_and_tokens(data)[0]), None)
    data = map_tensors(lambda tensor: tensor, data) if isinstance(data, Mapping) else data
    return Batch(data, Lineage.of_rows(first_row, count_rows(data, pieces)), None)
