"""A sequence of batches, read by position: a list, or one of the user's own that makes them when it's asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmati.core.batch import Data
from cosmati.errors import DataError
from cosmati.train.content import content_digest
from cosmati.train.marks import Mark
from cosmati.train.seen import CHANGED_IN_PLACE, LastGiven


class ByPosition:
    """Reads a step's batch. What isn't a plain list may draw while it does, and has no content that's known ahead.

    Args:
        data: the batches.
        seed: seeds the default generators for a step.
    """

    def __init__(self, data: Sequence[Data], seed: Callable[[int], None]) -> None:
        self._data, self._seed = data, seed
        self._is_plain = type(data) in (list, tuple)
        self._given: dict[int, Mark] = {}
        self._first: tuple[int, str] | None = None
        self._last, self._last_step = LastGiven(), -1
        self._expected: dict[int, str] = {}

    def read(self, step: int) -> Data:
        """Return a step's batch.

        Raises:
            DataError: it isn't what it was.
        """
        index = step % len(self._data)
        if self._is_plain:
            return self._held(index)
        self._last.look()
        expected, self._expected = self._expected, {}
        for earlier, digest in expected.items():
            if content_digest(self._drawn(earlier)).hex() != digest:
                self._refuse_other(earlier % len(self._data))
        batch = self._drawn(step)
        if self._first is None:
            self._first = step, content_digest(batch).hex()
        self._last.note(batch)
        self._last_step = step
        return batch

    def state(self) -> Mapping[str, Any]:
        """Return the digests of the first batch read and of the last one; a list's content is known ahead."""
        if self._is_plain:
            return {}
        digest = self._last.digest()
        last = [] if digest is None else [[self._last_step, digest]]
        return {"read": [*([list(self._first)] if self._first else []), *last]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have the batches that a checkpoint tells of compared before the next one is read."""
        self._expected = dict(map(tuple, state.get("read", ())))
        self._first = next(iter(self._expected.items()), self._first)

    def _drawn(self, step: int) -> Data:
        self._seed(step)
        return self._data[step % len(self._data)]

    def _held(self, index: int) -> Data:
        """Return a list's batch, unless a step has changed it in place: who resumes has the list as it was."""
        batch = self._data[index]
        self._last.look()
        if index not in self._given:
            self._given[index] = Mark(batch)
        mark = self._given[index]
        name = f"Batch {index} of the data"
        if mark.has_changed(batch):
            raise DataError(f"{name} {CHANGED_IN_PLACE}.")
        self._last.note(batch, mark, name)  # The list may hold one batch, or a part of it, in several places.
        return batch

    def look(self) -> None:
        """See what the last step has made of its batch: another trainer may be given the same data."""
        self._last.look()

    def _refuse_other(self, index: int) -> None:
        msg = (
            f"The {type(self._data).__name__} can't go on where the run stopped: batch {index} of the data is another "
            "one now. What it reads has changed, or what it draws doesn't follow from random, numpy.random and "
            "torch's default generators alone. Give it the rows that it had, or start in a new folder."
        )
        raise DataError(msg)
